"""Prepares JSON schemas for `grammar`. Pure."""

from collections.abc import Mapping
from typing import Any, Final

# Keywords by the kind of their value: a schema, a list of schemas, and an object with a schema for each name.
_ONE: Final = ("items", "contains", "additionalProperties", "propertyNames")
_LIST: Final = ("anyOf", "oneOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions")
# With these keywords, an object is described in several places, none of which lists all properties.
_COMBINING: Final = (
    "allOf", "not", "if", "then", "else", "dependentSchemas", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_BESIDE: Final = ("anyOf", "oneOf", "$ref")


class _CombinedError(Exception):
    """The schema describes an object in several places."""


def close_objects(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` in objects that name properties and do not describe others.
    A small model that may add properties writes them without end. vLLM's default backend, xgrammar, closes objects too.
    An answer that fits the result also fits `schema`. A schema that describes an object in several places is unchanged.
    """
    try:
        return _close(schema)
    except _CombinedError:
        return schema


def _close(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if any(key in schema for key in _COMBINING) or ("properties" in schema and any(key in schema for key in _BESIDE)):
        raise _CombinedError
    closed = dict(schema)
    for key in _ONE:
        if key in schema:
            closed[key] = _close(schema[key])
    for key in _LIST:
        if isinstance(schema.get(key), list):
            closed[key] = list(map(_close, schema[key]))
    for key in _NAMED:
        if isinstance(schema.get(key), Mapping):
            closed[key] = {name: _close(each) for name, each in schema[key].items()}
    named, required = schema.get("properties"), schema.get("required", [])
    is_open = not any(key in schema for key in ("additionalProperties", "patternProperties", "propertyNames"))
    if is_open and isinstance(named, Mapping) and isinstance(required, list) and all(map(named.__contains__, required)):
        closed["additionalProperties"] = False
    return closed
