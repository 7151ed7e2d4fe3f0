"""Reads the fields that restrict an answer to a form: OpenAI's, vLLM's and SGLang's names for the same four kinds.

Used by `schemas`, which has the fields. `text.grammar` turns the forms into grammars.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from conveyor_engine.text.grammar import Kind

CHOICES_MAX = 1024
_ANY_OBJECT = {"type": "object"}


class Form(NamedTuple):
    """The form that an answer must have: JSON of a schema, a regex, one of several texts, or a grammar."""

    kind: Kind
    value: Any


def _refuse(problem: str) -> PydanticCustomError:
    return PydanticCustomError("form", problem)


def _read_schema(value: object) -> Form:
    """Read a JSON schema, given as an object or as its text. Raises PydanticCustomError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _refuse("must be a JSON schema: the text is not JSON") from None
    if not isinstance(value, dict):
        raise _refuse("must be a JSON schema: an object")
    return Form("json", value)


def _read_text(kind: Kind) -> Callable[[object], Form]:
    def read(value: object) -> Form:
        if not isinstance(value, str) or not value:
            raise _refuse("must be a non-empty text")
        return Form(kind, value)

    return read


def _read_choice(value: object) -> Form:
    if isinstance(value, list) and 0 < len(value) <= CHOICES_MAX and all(isinstance(v, str) and v for v in value):
        return Form("choice", value)
    raise _refuse(f"must be a list of 1 to {CHOICES_MAX} texts, none of them empty")


_READERS: Mapping[str, Callable[[object], Form]] = {
    "json": _read_schema,
    "regex": _read_text("regex"),
    "choice": _read_choice,
    "grammar": _read_text("grammar"),
}


def _read_response_format(value: object) -> Form | None:
    """Read OpenAI's `response_format`; None for plain text. Raises PydanticCustomError."""
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Form("json", _ANY_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return Form("json", schema)
        case {"type": "json_schema"}:
            raise _refuse("must have json_schema.schema, an object")
    raise _refuse("must be an object whose type is text, json_object or json_schema")


def _read_structured_outputs(value: object) -> Form | None:
    """Read vLLM's `structured_outputs`. Raises PydanticCustomError."""
    if not isinstance(value, dict):
        raise _refuse("must be an object")
    asked = {name: each for name, each in value.items() if each is not None and each is not False}
    if "structural_tag" in asked:
        raise _refuse("must not have structural_tag, which this engine does not support")
    if asked.pop("json_object", None) is not None:
        asked["json"] = _ANY_OBJECT
    found = [name for name in _READERS if name in asked]
    if len(found) != 1:
        raise _refuse(f"must have exactly one of {', '.join(_READERS)} and json_object")
    try:
        return _READERS[found[0]](asked[found[0]])
    except PydanticCustomError as error:
        raise _refuse(f"has a wrong {found[0]}, which {error.message()}") from None


def _or_null(read: Callable[[object], Form | None]) -> PlainValidator:
    return PlainValidator(lambda value: None if value is None else read(value))


_TEXT = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]})
_SCHEMA_OR_TEXT = {"anyOf": [{"type": "object"}, {"type": "string", "pattern": r"^\s*\{"}]}
_SCHEMA = WithJsonSchema({"anyOf": [*_SCHEMA_OR_TEXT["anyOf"], {"type": "null"}]})
_CHOICES: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}

ResponseFormat = Annotated[
    Any,  # a Form or None, which pydantic must not validate
    _or_null(_read_response_format),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "properties": {"type": {"enum": ["text", "json_object"]}}, "required": ["type"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}, "schema": {"type": "object"}},
                            "required": ["schema"],
                        },
                    },
                    "required": ["type", "json_schema"],
                },
                {"type": "null"},
            ]
        }
    ),
]
StructuredOutputs = Annotated[
    Any,
    _or_null(_read_structured_outputs),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "json": _SCHEMA_OR_TEXT,
                        "regex": {"type": "string", "minLength": 1},
                        "choice": {**_CHOICES, "maxItems": CHOICES_MAX},
                        "grammar": {"type": "string", "minLength": 1},
                        "json_object": {"const": True},
                    },
                    "oneOf": [{"required": [name]} for name in (*_READERS, "json_object")],
                },
                {"type": "null"},
            ]
        }
    ),
]
Schema = Annotated[Any, _or_null(_read_schema), _SCHEMA]
Regex = Annotated[Any, _or_null(_read_text("regex")), _TEXT]
Grammar = Annotated[Any, _or_null(_read_text("grammar")), _TEXT]
Choice = Annotated[
    Any,
    _or_null(_read_choice),
    WithJsonSchema({"anyOf": [{**_CHOICES, "maxItems": CHOICES_MAX}, {"type": "null"}]}),
]
