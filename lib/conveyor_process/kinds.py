"""The kinds of settings: text, bounded numbers, choices and lists. Used by modules that declare settings. Pure."""

import re
from collections.abc import Callable, Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from conveyor_process.log import LogFormat
from conveyor_process.settings import ValueKind

T = TypeVar("T")

DAY_SECONDS: Final = 86_400.0


def _words(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


TEXT: Final = ValueKind("text", str)
WORDS: Final = ValueKind("text that is not empty", _words)
PATH: Final = ValueKind("a path", Path)


def whole_number(least: int, most: int | None = None, words: str = "a whole number") -> ValueKind[int]:
    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,15}", text) or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(text)
        return int(text)

    return ValueKind(f"{words} from {least}" + ("" if most is None else f" to {most}"), parse, is_text=False)


PORT: Final = whole_number(0, 65535, "a port number")


def number(least: float, most: float, words: str = "a number") -> ValueKind[float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(text) from None
        if not least <= value <= most:  # NaN fails both comparisons
            raise ValueError(text)
        return value

    return ValueKind(f"{words} from {least:g} to {most:g}", parse, is_text=False)


def seconds(most: float = DAY_SECONDS, least: float = 0.0) -> ValueKind[float]:
    return number(least, most, "a number of seconds")


def one_of(choices: Mapping[str, T], words: str, is_text: bool = True) -> ValueKind[T]:
    """Return the kind of a choice that ignores case."""

    def parse(text: str) -> T:
        if text.upper() not in choices:
            raise ValueError(text)
        return choices[text.upper()]

    return ValueKind(words, parse, is_text)


def literal(choices: Any) -> ValueKind[Any]:
    """Return the kind of a case-sensitive choice among the values of a type `Literal[...]`."""
    return among(*get_args(choices))


def among(*values: str) -> ValueKind[Any]:
    """Return the kind of a case-sensitive choice."""

    def parse(text: str) -> str:
        if text not in values:
            raise ValueError(text)
        return text

    return ValueKind("one of " + ", ".join(values), parse)


TRUE_OR_FALSE: Final = one_of({"TRUE": True, "FALSE": False}, "true or false", is_text=False)
LOG_LEVEL: Final = one_of(
    {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR")}, "DEBUG, INFO, WARNING or ERROR"
)
LOG_FORMAT: Final = literal(LogFormat)


Network = IPv4Network | IPv6Network


def _parse_networks(text: str) -> tuple[Network, ...]:
    networks = list[Network]()
    for entry in (each.strip() for each in text.split(",") if each.strip()):
        try:
            networks.append(ip_network(entry))
        except ValueError:
            raise ValueError(entry) from None
    return tuple(networks)


def _list_of(pattern: str, words: str, read: Callable[[str], str] = str) -> ValueKind[tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        entries = tuple(read(entry.strip()) for entry in text.split(",") if entry.strip())
        for entry in entries:
            if not re.fullmatch(pattern, entry):
                raise ValueError(entry)
        return entries

    return ValueKind(f"{words} with commas between", parse)


def _parse_header(text: str) -> str:
    if not re.fullmatch("[A-Za-z0-9-]{0,64}", text):
        raise ValueError
    return text


NAMESPACES: Final = _list_of("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "names of namespaces")
HEADER: Final = ValueKind("the name of an HTTP header, or empty", _parse_header)
NETWORKS: Final = ValueKind("networks in CIDR notation with commas between, each without host bits", _parse_networks)
ORIGINS: Final = _list_of(r"\*|[a-z][a-z0-9+.-]*://[^/,\s]+", "origins SCHEME://HOST[:PORT] or *", str.lower)
HOSTS_AND_PORTS: Final = _list_of(
    "[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?", "DNS names, each as NAME or NAME:PORT,", str.lower
)
HOSTS: Final = _list_of("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "DNS names", str.lower)
