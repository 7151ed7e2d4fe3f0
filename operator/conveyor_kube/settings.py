"""How the operator, the gateway and the metrics server are told what to do: flags, then variables, then defaults.

Each of them has a frozen dataclass `Settings` whose fields are made by `setting`, and a `Program` around it. Field
`admin_port` of `conveyor_gateway` is the flag `--admin-port` and the variable CONVEYOR_GATEWAY_ADMIN_PORT. Read once,
by `__main__`; `docs/configuration.py` writes the tables from the same fields.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

_DAY_SECONDS: Final = 86_400.0


class SettingsError(Exception):
    """A flag or an environment variable has a value that cannot be used."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What a setting may be, in words, and how its text is read; `parse` raises ValueError(what the text says)."""

    must_be: str
    parse: Callable[[str], T]


def setting(default: T, meaning: str, kind: Kind[T]) -> T:
    """A field of a dataclass of settings; the dataclass takes it for its default."""
    return field(default=default, metadata={"meaning": meaning, "kind": kind})


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the documentation."""

    flag: str
    variable: str
    must_be: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Program(Generic[S]):
    """A process: the module that `python -m` runs, what it does, and the dataclass of its settings."""

    module: str
    description: str
    settings: type[S]

    def variable(self, name: str) -> str:
        """The environment variable of a field."""
        return f"{self.module}_{name}".upper()

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}", allow_abbrev=False, description=self.description
        )
        for row in self.rows():
            parser.add_argument(row.flag, help=f"{row.meaning} (default {row.default!r}; ${row.variable})")
        return parser

    def parse(self, arguments: Sequence[str], environment: Mapping[str, str]) -> S:
        """Raises SettingsError; `--help` and unknown flags end the process, as argparse does."""
        known = {self.variable(each.name): each.name for each in self._fields()}
        ours = {variable: text for variable, text in environment.items() if variable.startswith(self.variable(""))}
        if unknown := sorted(ours.keys() - known.keys()):
            raise SettingsError(f"unknown environment variable {unknown[0]}; the known ones are in --help")
        texts = {known[variable]: text for variable, text in ours.items()}
        flags = vars(self.parser().parse_args(arguments))
        texts |= {name: text for name, text in flags.items() if text is not None}
        kinds = {each.name: each.metadata["kind"] for each in self._fields()}
        return self.settings(**{name: _read(name, text, kinds[name]) for name, text in texts.items()})

    def rows(self) -> Iterator[Row]:
        """All settings, in their order."""
        for each in self._fields():
            flag, must_be = "--" + each.name.replace("_", "-"), each.metadata["kind"].must_be
            yield Row(flag, self.variable(each.name), must_be, _written(each.default), each.metadata["meaning"])

    def _fields(self) -> tuple[Field[Any], ...]:
        return fields(self.settings)  # type: ignore[arg-type]  # a dataclass, which `type[S]` cannot say


def _read(name: str, text: str, kind: Kind[T]) -> T:
    try:
        return kind.parse(text)
    except ValueError as error:
        raise SettingsError(f"{name} {error}: it must be {kind.must_be}") from None


def _written(default: object) -> str:
    """A default as a person would give it."""
    if isinstance(default, bool):
        return str(default).lower()
    if default is None:
        return ""
    return ",".join(default) if isinstance(default, tuple) else str(default)


TEXT: Final = Kind("text", str)


def whole_number(least: int, most: int, words: str = "a whole number") -> Kind[int]:
    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,15}", text) or not least <= int(text) <= most:
            raise ValueError(f"is {text!r}")
        return int(text)

    return Kind(f"{words} from {least} to {most}", parse)


PORT: Final = whole_number(0, 65535, "a port number")


def seconds(most: float = _DAY_SECONDS, *, above_zero: bool = False) -> Kind[float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= most or (above_zero and number == 0):  # not a number is neither
            raise ValueError(f"is {text!r}")
        return number

    words = "above 0, up to" if above_zero else "from 0 to"
    return Kind(f"a number of seconds {words} {most:g}", parse)


def one_of(choices: Mapping[str, T], words: str) -> Kind[T]:
    """Upper and lower case are the same."""

    def parse(text: str) -> T:
        if text.upper() not in choices:
            raise ValueError(f"is {text.upper()!r}")
        return choices[text.upper()]

    return Kind(words, parse)


TRUE_OR_FALSE: Final = one_of({"TRUE": True, "FALSE": False}, "true or false")
LOG_LEVEL: Final = one_of(
    {level: level for level in ("DEBUG", "INFO", "WARNING", "ERROR")}, "DEBUG, INFO, WARNING or ERROR"
)


def _list_of(pattern: str, words: str, read: Callable[[str], str] = str) -> Kind[tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        entries = tuple(read(entry.strip()) for entry in text.split(",") if entry.strip())
        for entry in entries:
            if not re.fullmatch(pattern, entry):
                raise ValueError(f"has {entry!r}")
        return entries

    return Kind(f"{words} with commas between", parse)


NAMESPACES: Final = _list_of("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "names of namespaces")
HOSTS: Final = _list_of("[a-z0-9]([a-z0-9.-]*[a-z0-9])?", "DNS names", str.lower)
