"""Removes from a rewritten schema what no finite value fits, such as a list whose every element needs a further list.

A schema that refers to itself without an end would otherwise fail in the middle of an answer. Pure. Used by `prepare`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from conveyor_engine.text.schema.document import DEPTH_MAX, too_deep
from conveyor_engine.text.schema.keywords import kinds_of
from conveyor_engine.text.schema.problems import NoValueFits

_ROUNDS_MAX: Final = 64
_ROOT: Final = "#"
_PREFIX: Final = "#/$defs/"


def prune(root: Any, place_of: Callable[[Any], str]) -> Any:
    """Return the schema without what never ends, changed in place. Raises NoValueFits if nothing is left."""
    if isinstance(root, bool):
        if root:
            return root
        raise NoValueFits(_ROOT)
    definitions: Mapping[str, Any] = root.get("$defs", {})
    ending = _find_ending(definitions)
    if not ends(root, ending):
        _refuse(root, definitions, place_of)
    for schema in (root, *definitions.values()):
        _prune(schema, ending)
    return root


def _find_ending(definitions: Mapping[str, Any]) -> set[str]:
    """Return the definitions that a finite value fits."""
    found = set[str]()
    for _ in range(_ROUNDS_MAX):
        new = {name for name in reversed(list(definitions)) if name not in found and ends(definitions[name], found)}
        if not new:
            return found
        found |= new
    return set(definitions)


def ends(schema: Any, ending: set[str]) -> bool:
    """Return whether a finite value may fit the schema, if that is so for the definitions in `ending`."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_PREFIX) not in ending:
        return False
    if not all(ends(each, ending) for each in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(ends(each, ending) for each in schema["anyOf"]):
        return False
    kinds = set(kinds_of(schema))
    if "const" in schema or not kinds <= {"array", "object"}:
        return True
    if "enum" in schema:
        return bool(schema["enum"])
    return ("object" in kinds and _object_ends(schema, ending)) or ("array" in kinds and _array_ends(schema, ending))


def _object_ends(schema: Mapping[str, Any], ending: set[str]) -> bool:
    named, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    others = True if "patternProperties" in schema else others
    return all(ends(named.get(name, others), ending) for name in schema.get("required", ()))


def _array_ends(schema: Mapping[str, Any], ending: set[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    return all(ends(each, ending) for each in first[:least]) and (
        least <= len(first) or ends(schema.get("items", True), ending)
    )


def _prune(schema: Any, ending: set[str]) -> None:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, bool):
            continue
        if "anyOf" in each:
            each["anyOf"] = [branch for branch in each["anyOf"] if ends(branch, ending)]
        for name in ("properties", "patternProperties"):
            for key, inner in each.get(name, {}).items():
                if not ends(inner, ending) and key not in each.get("required", ()):
                    each[name][key] = False
        for name in ("items", "additionalProperties"):
            if name in each and not ends(each[name], ending):
                each[name] = False
        first = each.get("prefixItems", [])
        kept = next((number for number, inner in enumerate(first) if not ends(inner, ending)), len(first))
        if kept < len(first):
            each["prefixItems"], each["items"] = first[:kept], False
        waiting += within(each)


def within(schema: Any) -> Iterator[Any]:
    """Yield the schemas directly within a rewritten schema, without definitions."""
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield schema[name]
    for name in ("allOf", "anyOf", "prefixItems"):
        yield from schema.get(name, ())
    for name in ("properties", "patternProperties"):
        yield from schema.get(name, {}).values()


def _refuse(root: Any, definitions: Mapping[str, Any], place_of: Callable[[Any], str]) -> None:
    """Raise NoValueFits for a schema that no finite value fits."""
    known = set(definitions)
    blamed = next((each for each in (root, *definitions.values()) if not ends(each, known)), None)
    if blamed is not None:
        raise NoValueFits(place_of(blamed))
    ending = _find_ending(definitions)
    blamed = next((each for name, each in definitions.items() if name not in ending), root)
    raise NoValueFits(place_of(blamed), "$ref", "it refers to itself without an end, so no value fits")


def check_depth(root: Any) -> None:
    """Raise SchemaError if schemas are nested too deeply. References count too, each of them where it is first found.

    The library resolves references in the same order. Its own limits apply to whatever passes here.
    """
    seen = set[str]()
    definitions = root.get("$defs", {}) if isinstance(root, Mapping) else {}
    waiting: list[tuple[Any, int]] = [(root, 1)]
    while waiting:
        schema, depth = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        if depth > DEPTH_MAX:
            raise too_deep(_ROOT)
        reference = schema.get("$ref")
        if reference is not None and reference not in seen:
            seen.add(reference)
            waiting.append((definitions[reference.removeprefix(_PREFIX)], depth + 1))
        waiting += [(each, depth + 1) for each in reversed(list(within(schema)))]
