"""Returns why the API server would refuse an InferenceService, in its words. Used by `files`.

The models of `conveyor_api` check the same rules as the CustomResourceDefinition. This module turns their errors into
the API server's texts; a test compares both for every invalid resource of tests/api.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from conveyor_api import names
from conveyor_api.base import RULE_ERROR
from conveyor_api.crd import Schema, build_schema
from conveyor_api.resource import InferenceService

_TYPES: Final = {
    "string_type": "string",
    "int_type": "integer",
    "bool_type": "boolean",
    "list_type": "array",
    "dict_type": "object",
    "model_type": "object",
    "model_attributes_type": "object",
}
_JSON_TYPES: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def describe_refusal(body: Mapping[str, Any]) -> str:
    """Return the API server's message for an InferenceService that it refuses; "" for a valid one."""
    name = body["metadata"]["name"]
    try:
        InferenceService.model_validate(dict(body), by_alias=True, by_name=False, extra="forbid")
    except ValidationError as error:
        found = error.errors(include_url=False)
    else:
        return ""
    unknown = [each for each in found if each["type"] == "extra_forbidden"]
    if unknown:
        fields = ", ".join(f'unknown field "{_name_path(each)}"' for each in unknown)
        kind = names.KIND
        return f'{kind} in version "{names.VERSION}" cannot be handled as a {kind}: strict decoding error: {fields}'
    problems = list(dict.fromkeys(_describe(each, body) for each in found))
    listed = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
    return f'{names.KIND}.{names.GROUP} "{name}" is invalid: {listed}'


def _name_path(details: ErrorDetails) -> str:
    """Return the path of a problem as the API server writes it: keys of maps and numbers of entries in brackets."""
    path, schema = "", _read_schema()
    for part in details["loc"]:
        is_key = isinstance(part, int) or "additionalProperties" in schema
        path += f"[{part}]" if is_key else f".{part}"
        members = schema.get("properties", {})
        schema = members.get(part) or schema.get("items") or schema.get("additionalProperties") or {}
    if field := details.get("ctx", {}).get("field"):
        path += f".{field}"
    return path.removeprefix(".")


@functools.cache
def _read_schema() -> Schema:
    return build_schema()


def _find_duplicate(entries: list[dict[str, Any]], key: str) -> tuple[int, str]:
    """Return the number of the second entry with this key, and the name of the key."""
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        names_of_key = {name for name, value in entry.items() if value == key}
        if found := names_of_key & seen:
            return number, min(found)
        seen |= names_of_key
    raise AssertionError("an entry has the key of an earlier one")


def _describe(details: ErrorDetails, body: Mapping[str, Any]) -> str:
    path, value, limits = _name_path(details), details.get("input"), details.get("ctx", {})
    shown = json.dumps(value, ensure_ascii=False)
    invalid = f"{path}: Invalid value: {shown}: "
    match details["type"]:
        case "missing":
            return f"{path}: Required value"
        case "literal_error":
            supported = ", ".join(f'"{each}"' for each in _read_literals(limits["expected"]))
            return f"{path}: Unsupported value: {shown}: supported values: {supported}"
        case "string_too_long":
            return f"{path}: Too long: may not be more than {limits['max_length']} bytes"
        case "string_too_short":
            return f"{invalid}{path} in body should be at least {limits['min_length']} chars long"
        case "too_long":
            return f"{path}: Too many: {len(value)}: must have at most {limits['max_length']} items"
        case "greater_than_equal":
            return f"{invalid}{path} in body should be greater than or equal to {limits['ge']}"
        case "less_than_equal":
            return f"{invalid}{path} in body should be less than or equal to {limits['le']}"
        case "duplicate":
            number, name = _find_duplicate(value, limits["key"])
            return f"{path}[{number}]: Duplicate value: {json.dumps({name: limits['key']}, separators=(',', ':'))}"
        case "int_type" if isinstance(value, float):
            checked = f'<nil>: Invalid value: "": Checked value must be of type integer with format int32 in {path}'
            return f'{path}: Invalid value: "float64": {path} in body must be of type int32: "float64", {checked}'
        case kind if kind in _TYPES:
            given = _name_type(value)
            return f'{path}: Invalid value: "{given}": {path} in body must be of type {_TYPES[kind]}: "{given}"'
        case kind if kind == RULE_ERROR:
            is_scalar = not isinstance(value, dict | list)
            return f"{path or '<nil>'}: Invalid value: {f'{shown}: ' * is_scalar}{details['msg']}"
    return f"{path}: {details['msg']}"


def _read_literals(expected: str) -> Iterator[str]:
    """Yield the choices in pydantic's text: `'A', 'B' or 'C'`."""
    for each in expected.replace(" or ", ", ").split(", "):
        yield each.strip("'")


def _name_type(value: Any) -> str:
    return "null" if value is None else _JSON_TYPES[type(value)]
