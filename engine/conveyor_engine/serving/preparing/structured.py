"""Reads the fields that restrict an answer to a form. OpenAI, vLLM and SGLang name the same kinds of forms differently.

Used by `schemas`, which has the fields. `text.grammar` turns the forms into grammars.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from conveyor_engine.text.grammar import BuiltGrammar, Kind, build_grammar, follow_schema
from conveyor_engine.text.tags import FindToken, Tag, Tags, build_tag_grammar

CHOICES_MAX = 1024
TAGS_MAX = 128
_ANY_OBJECT = {"type": "object"}


class Form(NamedTuple):
    """The form of an answer: JSON of a schema, a regex, one of several texts, a grammar, or tags in free text."""

    kind: Kind | Literal["tags"]
    value: Any
    strict: bool = False  # the answer must follow every keyword of the schema


def build_form_grammar(form: Form, field: str, find_token: FindToken) -> BuiltGrammar:
    """Return the grammar of a form. field: the request's field that requires it. Raises InvalidRequest."""
    if form.kind != "tags":
        return build_grammar(form.kind, form.value, field, strict=form.strict)
    tags = [_prepare_tag(tag, field) for tag in form.value.tags]
    text = build_tag_grammar(form.value._replace(tags=tags), find_token)
    relaxed = [each for tag in tags if tag.schema is not None for each in tag.schema.relaxed]
    return BuiltGrammar(build_grammar("lark", text, field).text, relaxed)


def _prepare_tag(tag: Tag, field: str) -> Tag:
    """Return the tag with a schema that the library follows. Raises InvalidRequest."""
    if tag.schema is None:
        build_grammar("regex", tag.regex, field)
        return tag
    return tag._replace(schema=follow_schema(tag.schema, field))


def _refuse(problem: str) -> PydanticCustomError:
    return PydanticCustomError("form", problem)


def _read_json(value: object, problem: str) -> object:
    """Return the value of a JSON text, and any other value unchanged. Raises PydanticCustomError with the problem."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise _refuse(problem) from None


def _read_schema(value: object) -> Form:
    """Read a JSON schema, given as an object or as its text. Raises PydanticCustomError."""
    value = _read_json(value, "must be a JSON schema: the text is not JSON")
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


def read_tags(value: object) -> Form:
    """Read structural tags in vLLM's older form, or xgrammar's `triggered_tags`, given as an object or as its text."""
    value = _read_json(value, "must be an object: the text is not JSON")
    match value:
        case {"format": {"type": "triggered_tags", "triggers": list(triggers), "tags": list(tags), **more}}:
            flags = (more.get(name) is True for name in ("at_least_one", "stop_after_first"))
            found = Tags(triggers, list(map(_read_tag, tags)), *flags)
        case {"structures": list(tags), "triggers": list(triggers)}:
            found = Tags(triggers, list(map(_read_structure, tags)))
        case _:
            raise _refuse("must have structures and triggers, or a format of the type triggered_tags")
    if not 0 < len(found.tags) <= TAGS_MAX or not 0 < len(triggers) <= TAGS_MAX:
        raise _refuse(f"must have 1 to {TAGS_MAX} tags and triggers")
    if not all(isinstance(each, str) and each for each in triggers):
        raise _refuse("must have triggers that are non-empty texts")
    for tag in found.tags:
        if not any(tag.begin.startswith(each) for each in triggers):
            raise _refuse(f"has a tag that begins with none of the triggers: {tag.begin[:100]!r}")
    return Form("tags", found)


def _read_structure(value: object) -> Tag:
    match value:
        case {"begin": str(begin), "end": str(end), **more}:
            return Tag(begin, more.get("schema", {}), "", end)
    raise _refuse("must have structures with the texts begin and end, and a schema")


def _read_tag(value: object) -> Tag:
    match value:
        case {"begin": str(begin), "content": {"type": "json_schema", "json_schema": schema}, "end": str(end)}:
            return Tag(begin, schema, "", end)
        case {"begin": str(begin), "content": {"type": "regex", "pattern": str(pattern)}, "end": str(end)}:
            return Tag(begin, None, pattern, end)
    raise _refuse("must have tags with the texts begin and end, and a content of the type json_schema or regex")


_READERS: Mapping[str, Callable[[object], Form]] = {
    "json": _read_schema,
    "regex": _read_text("regex"),
    "choice": _read_choice,
    "grammar": _read_text("grammar"),
    "structural_tag": read_tags,
}


def _read_response_format(value: object) -> Form | None:
    """Read OpenAI's `response_format`; None for plain text. Raises PydanticCustomError."""
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Form("json", _ANY_OBJECT)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **more}}:
            if not isinstance(more.get("name"), str | None):
                raise _refuse("must have a json_schema.name that is a string")
            return Form("json", schema, strict=more.get("strict") is True)
        case {"type": "json_schema"}:
            raise _refuse("must have json_schema.schema, an object")
        case {"type": "structural_tag"}:
            return read_tags(value)
    raise _refuse("must be an object whose type is text, json_object, json_schema or structural_tag")


def _read_structured_outputs(value: object) -> Form | None:
    """Read vLLM's `structured_outputs`. Raises PydanticCustomError."""
    if not isinstance(value, dict):
        raise _refuse("must be an object")
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    if (any_object := given.pop("json_object", None)) is not None:
        if any_object is not True:
            raise _refuse("must have a json_object that is true")
        given["json"] = _ANY_OBJECT
    found = [name for name in _READERS if name in given]
    if len(found) != 1:
        raise _refuse(f"must have exactly one of {', '.join(_READERS)} and json_object")
    try:
        return _READERS[found[0]](given[found[0]])
    except PydanticCustomError as error:
        raise _refuse(f"has a wrong {found[0]}, which {error.message()}") from None


def _or_null(read: Callable[[object], Form | None]) -> PlainValidator:
    return PlainValidator(lambda value: None if value is None else read(value))


_TEXT = WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]})
_SCHEMA_OR_TEXT = {"anyOf": [{"type": "object"}, {"type": "string", "pattern": r"^\s*\{"}]}
_SCHEMA = WithJsonSchema({"anyOf": [*_SCHEMA_OR_TEXT["anyOf"], {"type": "null"}]})
_CHOICES: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}

_TAGS: dict[str, Any] = {
    "structures": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"begin": {"type": "string"}, "end": {"type": "string"}, "schema": {}},
            "required": ["begin", "end"],
        },
        "minItems": 1,
        "maxItems": TAGS_MAX,
    },
    "triggers": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": TAGS_MAX},
    "format": {"type": "object", "properties": {"type": {"const": "triggered_tags"}}, "required": ["type"]},
}
_EITHER_TAGS = [{"required": ["structures", "triggers"]}, {"required": ["format"]}]

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
                            "properties": {"name": {"type": ["string", "null"]}, "schema": {"type": "object"}},
                            "required": ["schema"],
                        },
                    },
                    "required": ["type", "json_schema"],
                },
                {
                    "type": "object",
                    "properties": {"type": {"const": "structural_tag"}, **_TAGS},
                    "required": ["type"],
                    "anyOf": _EITHER_TAGS,
                },
                {"type": "null"},
            ]
        }
    ),
]
_ABSENT: dict[str, Any] = {"enum": [None, False]}  # the same as leaving the field out
_OUTPUTS: dict[str, Any] = {
    "json": _SCHEMA_OR_TEXT,
    "regex": {"type": "string", "minLength": 1},
    "choice": {**_CHOICES, "maxItems": CHOICES_MAX},
    "grammar": {"type": "string", "minLength": 1},
    "structural_tag": {
        "anyOf": [
            {"type": "object", "properties": _TAGS, "anyOf": _EITHER_TAGS},
            {"type": "string", "pattern": r"^\s*\{"},
        ]
    },
    "json_object": {"const": True},
}
StructuredOutputs = Annotated[
    Any,
    _or_null(_read_structured_outputs),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {name: {"anyOf": [schema, _ABSENT]} for name, schema in _OUTPUTS.items()},
                    "oneOf": [
                        {"required": [name], "properties": {name: {"not": _ABSENT}}}
                        for name in (*_READERS, "json_object")
                    ],
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
