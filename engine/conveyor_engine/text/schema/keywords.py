"""The keywords of JSON Schema: what each value must be, and where schemas are within a schema. Pure."""

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from conveyor_engine.text.schema.problems import SchemaError

KINDS: Final = ("null", "boolean", "number", "string", "array", "object")
TYPES: Final = frozenset({*KINDS, "integer"})
_TYPES: Final = frozenset({*KINDS, "integer"})


def is_number(value: object) -> bool:
    """Return whether the value is a JSON number, and no integer that a float cannot hold. true and false are not."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return isinstance(value, float) and value == value  # NaN is none


def is_writable(value: object) -> bool:
    """Return whether the library can read all numbers of the value."""
    if isinstance(value, Mapping | list):
        return all(map(is_writable, value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, int | float) or -(2**63) <= value < 2**63 or isinstance(value, bool)


def is_count(value: object) -> bool:
    """Return whether the value is a whole number of at least 0. 3.0 is whole, as everywhere in JSON Schema."""
    return is_number(value) and value >= 0 and float(value).is_integer()  # type: ignore[operator, arg-type]


def is_schema(value: object) -> bool:
    """Return whether the value may be a schema: an object, true or false."""
    return isinstance(value, Mapping | bool)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: object) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and all(isinstance(name, str) and name in _TYPES for name in names)


def _is_schemas(value: object) -> bool:
    return isinstance(value, list) and all(map(is_schema, value))


def _is_named(is_each: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Mapping) and all(map(is_each, value.values()))


_NUMBER: Final = (is_number, "a number")
_LIMIT: Final = (lambda value: is_number(value) or isinstance(value, bool), "a number")  # draft 4: true or false
_COUNT: Final = (is_count, "a whole number that is not negative")
_TEXT: Final = (lambda value: isinstance(value, str), "a text")
_TEXTS: Final = (_is_texts, "a list of names")
_ONE: Final = (is_schema, "a schema: an object, true or false")
_MANY: Final = (_is_schemas, "a list of schemas")
_NAMED: Final = (_is_named(is_schema), "an object of schemas")
_VALUES: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "type": (_is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of these"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _LIMIT),
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"), _TEXT),
    "required": (lambda value: isinstance(value, bool) or _is_texts(value), "a list of names"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _MANY),
    "items": (lambda value: is_schema(value) or _is_schemas(value), "a schema or a list of schemas"),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames", "additionalItems"), _ONE),
    **dict.fromkeys(("additionalProperties", "unevaluatedProperties", "unevaluatedItems"), _ONE),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"), _NAMED),
    "dependentRequired": (_is_named(_is_texts), "an object of lists of names"),
    "dependencies": (_is_named(lambda each: is_schema(each) or _is_texts(each)), "an object of schemas or names"),
}
WORDS: Final = frozenset(_VALUES) | {"const"}  # the keywords with an effect
_IN_ONE: Final = tuple(name for name, check in _VALUES.items() if check is _ONE)
_IN_MANY: Final = tuple(name for name, check in _VALUES.items() if check is _MANY)
_IN_NAMED: Final = tuple(name for name, check in _VALUES.items() if check is _NAMED)


def check(schema: Mapping[str, Any], pointer: str) -> None:
    """Raise SchemaError if a keyword of this schema has a value of a wrong type. Does not look at schemas within it."""
    for name, (is_right, must) in _VALUES.items():
        if name in schema and not is_right(schema[name]):
            raise SchemaError(f"the value must be {must}", pointer, name)


def children(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly within a schema, each with its place: the rest of its JSON pointer."""
    for name in (*_IN_ONE, "items"):
        if is_schema(schema.get(name)):
            yield f"/{name}", schema[name]
    for name in (*_IN_MANY, "items"):
        if isinstance(schema.get(name), list):
            yield from ((f"/{name}/{number}", each) for number, each in enumerate(schema[name]))
    for name in (*_IN_NAMED, "dependencies"):
        if isinstance(schema.get(name), Mapping):
            yield from ((f"/{name}/{escape(key)}", each) for key, each in schema[name].items() if is_schema(each))


def essence(schema: Any) -> Any:
    """Return a schema without annotations. Equal results mean the same, if references mean the same."""
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _IN_NAMED or name == "dependencies":
            kept[name] = {key: essence(each) for key, each in value.items()}
        elif isinstance(value, list) and name in (*_IN_MANY, "items"):
            kept[name] = list(map(essence, value))
        elif name in WORDS or name.startswith("$") or name == "id":
            kept[name] = essence(value) if name in (*_IN_ONE, "items") else value
    return kept


def escape(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def kinds_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kinds of values that `type` allows. Integers are numbers."""
    types = schema.get("type", KINDS)
    allowed = {types} if isinstance(types, str) else set(types)
    return tuple(kind for kind in KINDS if kind in allowed or (kind == "number" and "integer" in allowed))


def is_whole(schema: Mapping[str, Any]) -> bool:
    """Return whether `type` allows no numbers but integers."""
    types = schema.get("type", ())
    return "integer" in types and "number" not in types if isinstance(types, list) else types == "integer"


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value."""
    return "number" if (name := type_of(value)) == "integer" else name


def type_of(value: Any) -> str:
    """Return the type of a JSON value; that of 1.0 is `integer`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
