"""Finds the layers that a quantized checkpoint stores in 16 bits, by what its files declare.

Reading weights does not need it, because tensors show how they are stored. `preview.describe` has no tensors. It limits
the time, because the expressions of a checkpoint may take any.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

_LISTS: Final = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
_PLAIN_BITS: Final = 16
_EXPRESSION: Final = "re:"
_WILDCARD: Final = re.compile(r"[*?\[]")
_CLASS: Final = re.compile(r"[A-Z]\w*")
# Parts of names that checkpoints and transformers' classes do not share.
_VARIABLE: Final = re.compile(r"(?:^|(?<=\.))(?:model|language_model)\.")
_EXPERT: Final = ("", ".0.gate_proj", ".0.w1")  # names of an expert's matrix, behind that of all experts


def list_plain(settings: Mapping[str, Any]) -> list[str]:
    """Return what a declaration has for its layers that are not quantized.

    Each entry is a name, or a part of one, or has wildcards, or is an expression behind `re:`. compressed-tensors has
    names and expressions, ModelOpt and Quark names with wildcards, transformers ends or beginnings of names, GPTQModel
    expressions with other settings (`dynamic`), and AutoRound the bits of single layers.
    """
    found = [each for key in _LISTS for each in _strings(settings.get(key))]
    dynamic, single = settings.get("dynamic"), settings.get("extra_config")
    found += [_EXPRESSION + each[2:] for each in _strings(dynamic) if each.startswith("-:")]
    if isinstance(single, dict):
        found += [name for name, own in single.items() if isinstance(own, dict) and _is_plain(own)]
    return found


def list_targets(kinds: Iterable[Any]) -> list[str]:
    """Return such entries for the layers of compressed-tensors' groups; none if they name a class, such as `Linear`."""
    targets = [each for kind in kinds if isinstance(kind, dict) for each in _strings(kind.get("targets"))]
    return [] if any(map(_CLASS.fullmatch, targets)) else targets


def is_plain(plain: tuple[str, ...], targets: tuple[str, ...], path: str) -> bool:
    """Return whether a module has 16 bits. path: its name in transformers' class."""
    return _matches(plain, path) or (bool(targets) and not _matches(targets, path))


def _matches(entries: tuple[str, ...], path: str) -> bool:
    names, patterns = _compile(entries)
    bare = _VARIABLE.sub("", path)
    full = [name + end for name in {path, bare, f"model.{bare}"} for end in _EXPERT]
    return any(not names.isdisjoint(_list_parts(each)) or any(one.match(each) for one in patterns) for each in full)


@cache
def _compile(entries: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Return the names among the entries, of which there may be thousands, and the patterns."""
    names, patterns = set[str](), list[re.Pattern[str]]()
    for entry in entries:
        bare = _VARIABLE.sub("", entry)
        if entry.startswith(_EXPRESSION):
            source = entry.removeprefix(_EXPRESSION)
        elif _WILDCARD.search(bare):
            source = rf"(?:.*\.)?{fnmatch.translate(bare)[:-2]}(?:\.|$)"
        else:
            names.add(bare)
            continue
        try:
            patterns.append(re.compile(source))
        except re.error:
            continue  # names no layer
    return frozenset(names), tuple(patterns)


def _list_parts(name: str) -> set[str]:
    """Return all runs of a name's words."""
    words = name.split(".")
    return {".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}


def _is_plain(own: Mapping[str, Any]) -> bool:
    return type(own.get("bits")) is int and own["bits"] >= _PLAIN_BITS


def _strings(entries: Any) -> Iterator[str]:
    yield from (each for each in entries if isinstance(each, str)) if isinstance(entries, list | dict) else ()
