"""Finds the layers that a quantized checkpoint stores in 16 bits, by what its files declare.

Reading weights does not need it, because tensors show how they are stored. `preview.describe` has no tensors.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_LISTS: Final = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
_PLAIN_BITS: Final = 16
_EXPRESSION: Final = "re:"
_CLASS: Final = re.compile(r"[A-Z]\w*")
# Parts of names that checkpoints and transformers' classes do not share.
_VARIABLE: Final = re.compile(r"(?:^|(?<=\.))(?:model|language_model)\.")
_EXPERT: Final = ("", ".0.gate_proj", ".0.w1")  # names of an expert's matrix, behind that of all experts


def list_plain(settings: Mapping[str, Any]) -> list[str]:
    """Return regular expressions for the names of the layers that a declaration names as not quantized.

    compressed-tensors has names and expressions, ModelOpt and Quark names with wildcards, transformers ends or
    beginnings of names, GPTQModel expressions with other settings (`dynamic`), and AutoRound the bits of single layers.
    """
    found = [_translate(each) for key in _LISTS for each in _strings(settings.get(key))]
    dynamic, single = settings.get("dynamic"), settings.get("extra_config")
    found += [each[2:] for each in _strings(dynamic) if each.startswith("-:")]
    if isinstance(single, dict):
        found += [_translate(name) for name, own in single.items() if isinstance(own, dict) and _is_plain(own)]
    return found


def list_targets(kinds: Iterable[Any]) -> list[str]:
    """Return regular expressions for the layers of compressed-tensors' groups; none if they name a class, such as
    `Linear`.
    """
    targets = [each for kind in kinds if isinstance(kind, dict) for each in _strings(kind.get("targets"))]
    return [] if any(map(_CLASS.fullmatch, targets)) else list(map(_translate, targets))


def is_plain(plain: Iterable[str], targets: Iterable[str], path: str) -> bool:
    """Return whether a module has 16 bits. path: its name in transformers' class."""
    wanted = list(targets)
    return _matches(plain, path) or (bool(wanted) and not _matches(wanted, path))


def _matches(expressions: Iterable[str], path: str) -> bool:
    names = {path, _VARIABLE.sub("", path), f"model.{_VARIABLE.sub('', path)}"}
    return any(_search(each, name + end) for each in expressions for name in names for end in _EXPERT)


def _search(expression: str, name: str) -> bool:
    try:
        return re.match(expression, name) is not None
    except re.error:
        return False


def _translate(entry: str) -> str:
    """Return an expression that is matched from the beginning of a name."""
    if entry.startswith(_EXPRESSION):
        return entry.removeprefix(_EXPRESSION)
    entry = _VARIABLE.sub("", entry)
    return rf"(?:.*\.)?{fnmatch.translate(entry)[:-2]}(?:\.|$)"


def _is_plain(own: Mapping[str, Any]) -> bool:
    return type(own.get("bits")) is int and own["bits"] >= _PLAIN_BITS


def _strings(entries: Any) -> Iterator[str]:
    yield from (each for each in entries if isinstance(each, str)) if isinstance(entries, list | dict) else ()
