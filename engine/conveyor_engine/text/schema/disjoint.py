"""Finds out which branches of a `oneOf` exclude each other, so that no answer fits two of them. Pure.

The result is never wrong in one direction: branches that are called disjoint are disjoint. Used by `choices`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from conveyor_engine.text.schema.keywords import TYPES, type_of

_STEPS_MAX: Final = 5_000  # comparisons for one `oneOf`
_DEPTH_MAX: Final = 16  # levels of properties and references that are compared
# For each kind: keywords of the lowest and of the highest value or length, and whether the bound itself is excluded.
_BOUNDS: Final[Mapping[str, tuple[Mapping[str, bool], Mapping[str, bool]]]] = {
    "number": ({"minimum": False, "exclusiveMinimum": True}, {"maximum": False, "exclusiveMaximum": True}),
    "string": ({"minLength": False}, {"maxLength": False}),
    "array": ({"minItems": False}, {"maxItems": False}),
    "object": ({"minProperties": False}, {"maxProperties": False}),
}
# With these keywords, an object may have properties that its `properties` do not name.
_OPENING: Final = (
    "anyOf", "oneOf", "if", "not", "dependentSchemas", "dependencies", "additionalProperties", "patternProperties",
    "propertyNames", "unevaluatedProperties",
)  # fmt: skip
Resolve = Callable[[str], Any]  # the schema that a reference names; None if there is none


def distinguish(branches: Sequence[Any], resolve: Resolve) -> list[Any] | None:
    """Return the branches, each of which requires the property whose `const` tells them apart; None if there is none.

    Such a property is the discriminator of a tagged union.
    """
    views = [_view(branch, resolve) for branch in branches]
    if any(_kinds(view) != {"object"} for view in views):
        return None
    for name in _properties(views[0]):
        tags = [_tag(_properties(view).get(name), resolve) for view in views]
        if None not in tags and len(set(tags)) == len(tags):
            return [
                branch if name in _required(view) else _require(branch, name)
                for branch, view in zip(branches, views, strict=True)
            ]
    return None


def _tag(schema: Any, resolve: Resolve) -> str | None:
    values = _values(_view(schema, resolve))
    return None if values is None or len(values) != 1 else json.dumps(_plain(values[0]), sort_keys=True)


def _require(branch: Mapping[str, Any], name: str) -> dict[str, Any]:
    required = branch.get("required", [])
    return {**branch, "required": required if name in required else [*required, name]}


def find_overlaps(branches: Sequence[Any], resolve: Resolve, *, are_closed: bool) -> Iterator[tuple[int, int]]:
    """Yield the numbers of two branches if an answer that is made from the first may also fit the second.

    are_closed: whether an answer has no properties but those that its branch names, if the branch names any.
    """
    comparison = _Comparison(resolve, are_closed=are_closed)
    for first, branch in enumerate(branches):
        for second, other in enumerate(branches):
            if first != second and not comparison.is_disjoint(branch, other, 0):
                yield first, second


class _Comparison:
    def __init__(self, resolve: Resolve, *, are_closed: bool) -> None:
        self._resolve, self._are_closed = resolve, are_closed
        self._num_steps = 0

    def is_disjoint(self, mine: Any, other: Any, depth: int) -> bool:
        """Return whether no answer made from `mine` is valid by `other`."""
        self._num_steps += 1
        if depth > _DEPTH_MAX or self._num_steps > _STEPS_MAX:
            return False
        if mine is False or other is False:
            return True
        a, b = _view(mine, self._resolve), _view(other, self._resolve)
        if self._are_closed and _properties(a) and not any(key in a for key in _OPENING):
            a["additionalProperties"] = not _required(a) <= set(_properties(a))
        if any(all(self.is_disjoint(each, other, depth + 1) for each in options) for options in _options(a)):
            return True
        if any(all(self.is_disjoint(mine, each, depth + 1) for each in options) for options in _options(b)):
            return True
        if (values := _values(a)) is not None:
            return all(_rejects(b, value) for value in values)
        if (values := _values(b)) is not None:
            return all(_rejects(a, value) for value in values)
        kinds = _common_kinds(_kinds(a), _kinds(b))
        return all(_are_apart(a, b, kind) or (kind == "object" and self._objects(a, b, depth)) for kind in kinds)

    def _objects(self, mine: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        if _lacks(mine, other) or _lacks(other, mine):
            return True
        ours, theirs = _properties(mine), _properties(other)
        names = (_required(mine) | _required(other)) & set(ours) & set(theirs)
        return any(self.is_disjoint(ours[name], theirs[name], depth + 1) for name in names)


def _view(schema: Any, resolve: Resolve) -> dict[str, Any]:
    """Return one schema in place of a schema, its references and its `allOf`: each keyword as it is first found.

    Whatever the result excludes, the schema excludes too.
    """
    view: dict[str, Any] = {}
    waiting, num_left = [schema], 64
    while waiting and num_left:
        num_left -= 1
        each = waiting.pop(0)
        if not isinstance(each, Mapping):
            continue
        if isinstance(each.get("$ref"), str):
            waiting.append(resolve(each["$ref"]))
        if isinstance(each.get("allOf"), list):
            waiting += each["allOf"]
        properties = {**_properties(each), **_properties(view)}
        required = [*_required(view), *_required(each)]
        view = {**each, **view, "properties": properties, "required": required}
        view["_patterns"] = view.get("_patterns") or "patternProperties" in each
    return view


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    named = schema.get("properties")
    return named if isinstance(named, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _options(view: Mapping[str, Any]) -> Iterator[list[Any]]:
    return (view[key] for key in ("anyOf", "oneOf") if isinstance(view.get(key), list) and view[key])


def _values(view: Mapping[str, Any]) -> list[Any] | None:
    if "const" in view:
        return [view["const"]]
    return view["enum"] if isinstance(view.get("enum"), list) else None


def _kinds(view: Mapping[str, Any]) -> frozenset[str]:
    kinds = view.get("type", TYPES)
    return frozenset([kinds] if isinstance(kinds, str) else kinds) & TYPES


def _common_kinds(mine: frozenset[str], other: frozenset[str]) -> set[str]:
    """Return the kinds that both allow. A number stands for an integer too."""
    common = set(mine & other)
    if {"integer", "number"} & mine and {"integer", "number"} & other:
        common.add("number")
    return common - {"integer"}


def _are_apart(mine: Mapping[str, Any], other: Mapping[str, Any], kind: str) -> bool:
    """Return whether the bounds of both leave no value of this kind: no number, or no length."""
    if kind not in _BOUNDS:
        return False
    least, most = _BOUNDS[kind]
    lowest, is_low_open = max(_bounds(mine, other, least), default=(-math.inf, False))
    highest, is_high_open = min(
        _bounds(mine, other, most), key=lambda bound: (bound[0], not bound[1]), default=(math.inf, False)
    )
    return lowest > highest or (lowest == highest and (is_low_open or is_high_open))


def _bounds(
    mine: Mapping[str, Any], other: Mapping[str, Any], names: Mapping[str, bool]
) -> Iterator[tuple[float, bool]]:
    """Yield the bounds with these names, and whether each bound itself is excluded."""
    for name, excludes in names.items():
        for schema in (mine, other):
            value = schema.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value, excludes


def _lacks(closed: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether `other` requires a property that `closed` does not allow."""
    if closed.get("additionalProperties") is not False or closed["_patterns"]:
        return False
    return not _required(other) <= set(_properties(closed))


def _rejects(view: Mapping[str, Any], value: Any) -> bool:
    """Return whether the value is certainly not valid."""
    kind = type_of(value)
    kinds = _kinds(view)
    if kind not in kinds and not (kind == "integer" and "number" in kinds):
        return True
    allowed = _values(view)
    if allowed is not None and _plain(value) not in map(_plain, allowed):
        return True
    fixed = {"const": value}
    if kind in ("integer", "number"):
        fixed = {"minimum": value, "maximum": value}
    elif kind == "string":
        fixed = {"minLength": len(value), "maxLength": len(value)}
    elif kind == "array":
        fixed = {"minItems": len(value), "maxItems": len(value)}
    elif kind == "object":
        return any(name not in value for name in _required(view)) or any(
            _rejects_simply(each, value[name]) for name, each in _properties(view).items() if name in value
        )
    return _are_apart(fixed, view, "number" if kind == "integer" else kind)


def _rejects_simply(schema: Any, value: Any) -> bool:
    if schema is False:
        return True
    is_plain = isinstance(schema, Mapping) and "$ref" not in schema
    return is_plain and _rejects({**schema, "_patterns": False}, value)


def _plain(value: Any) -> Any:
    """Return the value in a form in which 1 and 1.0 are equal, and 1 and true are not."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return (type(value).__name__, value)
    if isinstance(value, int | float):
        return ("number", value)
    if isinstance(value, list):
        return ("array", tuple(map(_plain, value)))
    return ("object", tuple(sorted((name, _plain(each)) for name, each in value.items())))
