"""Prepares JSON schemas for `grammar`. An answer that fits a prepared schema also fits the client's schema. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from conveyor_engine.text.disjoint import distinguish, find_overlap, find_reference

# Keywords by the kind of their value: a schema, a list of schemas, and an object with a schema for each name.
_ONE: Final = ("items", "contains", "additionalProperties", "propertyNames")
_LIST: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
# With these keywords, an object is described in several places, none of which lists all properties.
_COMBINING: Final = (
    "allOf", "not", "if", "then", "else", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_BESIDE: Final = ("anyOf", "oneOf", "$ref")
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
)
DEPTH_MAX: Final = 256  # schemas on a path from the root, `$ref` included; the library's recursion overflows at 900
_SMALLEST_STEP: Final = 1e-9  # to the next number that an exclusive bound allows
_DIGITS: Final = 15  # of a decimal number that a float represents exactly


class SchemaError(Exception):
    """The engine cannot follow the schema."""


class _CombinedError(Exception):
    """The schema describes an object in several places."""


def prepare_schema(schema: Any) -> Any:
    """Return the schema from which the library builds a grammar. Raises SchemaError if answers could violate `schema`.

    The library treats `oneOf` as `anyOf`, so the branches must exclude each other. It also allows some exclusive
    bounds of numbers, so these become bounds that are not exclusive.
    """
    _check_depth(schema)
    followed = _follow_one_of(close_objects(schema), schema)
    return _change(followed, lambda each: _merge_branches(_replace_exclusive_bounds(each)))


def close_objects(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in objects that name properties and do not describe others.
    A small model that may add properties writes them without end. vLLM's default backend, xgrammar, closes objects too.
    An answer that fits the result also fits `schema`. A schema that describes an object in several places is unchanged.
    """
    try:
        return _change(schema, _close)
    except _CombinedError:
        return schema


def _change(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy in which `change` has replaced each schema, after the schemas within it."""
    if not isinstance(schema, Mapping):
        return schema
    changed = dict(schema)
    for key in _ONE:
        if key in schema:
            changed[key] = _change(schema[key], change)
    for key in _LIST:
        if isinstance(schema.get(key), list):
            changed[key] = [_change(each, change) for each in schema[key]]
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            changed[key] = {name: _change(each, change) for name, each in schema[key].items()}
    return change(changed)


def _children(schema: Mapping[str, Any]) -> list[Any]:
    """Return the schemas directly within the schema, without those in `$defs`."""
    children = [schema[key] for key in _ONE if key in schema]
    children += [each for key in _LIST if isinstance(schema.get(key), list) for each in schema[key]]
    named = (schema[key] for key in ("properties", "patternProperties") if isinstance(schema.get(key), Mapping))
    return children + [each for every in named for each in every.values()]


def _check_depth(root: Any) -> None:
    """Raise SchemaError if schemas are nested too deeply. References count too, each of them where it is first found.

    The library resolves references in the same order. Its own limits apply to whatever passes here.
    """
    seen = set[str]()
    waiting: list[tuple[Any, int]] = [(root, 1)]
    while waiting:
        schema, depth = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        if depth > DEPTH_MAX:
            raise SchemaError(f"schemas are nested more than {DEPTH_MAX} levels deep, references included")
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            waiting.append((find_reference(root, reference), depth + 1))
        waiting += [(each, depth + 1) for each in reversed(_children(schema))]


def _close(schema: dict[str, Any]) -> dict[str, Any]:
    if any(key in schema for key in _COMBINING) or ("properties" in schema and any(key in schema for key in _BESIDE)):
        raise _CombinedError
    named, required = schema.get("properties"), schema.get("required", [])
    is_open = not any(key in schema for key in ("additionalProperties", "patternProperties", "propertyNames"))
    if is_open and isinstance(named, Mapping) and isinstance(required, list) and all(map(named.__contains__, required)):
        return {**schema, "additionalProperties": False}
    return schema


def _follow_one_of(schema: Any, original: Any) -> Any:
    """Return the schema with branches of `oneOf` that exclude each other. Raises SchemaError if they do not.

    If a property tells the branches apart, each branch requires it. `original` is the client's schema, by which an
    answer must be valid: `schema` may be closed, so its answers fit fewer branches.
    """
    roots = (schema, original)

    def follow(each: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
        branches, theirs = each.get("oneOf"), own.get("oneOf")
        if not isinstance(branches, list) or not isinstance(theirs, list) or len(branches) == 1:
            return each
        if (distinct := distinguish(branches, schema)) is not None:
            return {**each, "oneOf": distinct}
        if (overlap := find_overlap(branches, theirs, roots)) is not None:
            first, second = overlap
            raise SchemaError(
                f"branches {first} and {second} of a oneOf may both be valid for one value; use anyOf, or require a"
                " property with a different const in each branch"
            )
        return each

    return _change_beside(schema, original, follow)


def _change_beside(
    schema: Any, other: Any, change: Callable[[dict[str, Any], Mapping[str, Any]], dict[str, Any]]
) -> Any:
    """Do what `_change` does. `change` also gets the schema at the same place of `other`."""
    if not isinstance(schema, Mapping) or not isinstance(other, Mapping):
        return schema
    changed = dict(schema)
    for key in _ONE:
        if key in schema and key in other:
            changed[key] = _change_beside(schema[key], other[key], change)
    for key in _LIST:
        if isinstance(schema.get(key), list):
            changed[key] = [_change_beside(a, b, change) for a, b in zip(schema[key], other[key], strict=True)]
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            changed[key] = {name: _change_beside(each, other[key][name], change) for name, each in schema[key].items()}
    return change(changed, other)


def _replace_exclusive_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a whole exclusive bound of a number by the next number with a few more digits.

    llguidance 1.9.1 allows such a bound itself if the other bound is less than 1 away. The other bound may be
    in another place (`allOf`, `$ref`), so all whole exclusive bounds are replaced.
    """
    if schema.get("type") == "integer":
        return schema
    changed = dict(schema)
    for name, bound, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        limit, other = schema.get(name), schema.get(bound)
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not float(limit).is_integer():
            continue
        digits = _DIGITS - len(str(abs(int(limit))))
        nearest = round(limit + sign * max(_SMALLEST_STEP, 10.0**-digits), max(digits, 0))
        del changed[name]
        if isinstance(other, int | float) and not isinstance(other, bool) and sign * other > sign * nearest:
            nearest = other
        changed[bound] = nearest
    return changed


def _merge_branches(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop equal branches of `anyOf`. The cost of a mask grows with the cube of their number."""
    if not isinstance(schema.get("anyOf"), list):
        return schema
    distinct = {json.dumps(_without_annotations(each), sort_keys=True): each for each in reversed(schema["anyOf"])}
    return {**schema, "anyOf": list(reversed(distinct.values()))}


def _without_annotations(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {key: each for key, each in schema.items() if key not in _ANNOTATIONS}
