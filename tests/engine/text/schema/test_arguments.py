"""Which arguments of a tool may be strings, and what else they may be."""

from typing import Any

import pydantic
import pytest

from conveyor_engine.text.schema.arguments import find_strings

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "others"),
    [
        (TEXT, []),
        ({"type": ["string", "null"]}, ["null"]),
        ({"anyOf": [TEXT, {"type": "null"}]}, ["null"]),
        ({"oneOf": [TEXT, {"type": "number"}]}, ["integer", "number"]),
        ({"allOf": [{"$ref": "#/$defs/text"}]}, []),
        ({"$ref": "#/$defs/text", "description": "beside a reference"}, []),
        ({"$ref": "#/$defs/itself"}, ["null"]),
        ({"enum": ["red", "blue"]}, []),
        ({"enum": ["red", 1, None]}, ["integer", "null"]),
        ({"const": "red"}, []),
    ],
)
def test_strings_are_found_behind_references_and_alternatives(schema: Any, others: list[str]) -> None:
    definitions = {"text": TEXT, "itself": {"anyOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/itself"}]}}
    tool = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    assert find_strings(tool) == {"a": others}


@pytest.mark.parametrize(
    "schema",
    [
        {}, True, "x", None, {"type": "integer"}, {"$ref": "#/$defs/lost"}, {"$ref": 5}, {"type": 5}, {"type": [5]},
        {"anyOf": {}}, {"enum": []}, {"anyOf": [{}]}, {"$ref": "#"}, {"$ref": "https://example.org/a.json"},
    ],
)  # fmt: skip
def test_arguments_without_known_types_are_left_out(schema: Any) -> None:
    assert find_strings({"properties": {"a": schema}}) == {}


@pytest.mark.parametrize("schema", [{}, {"properties": 5}, {"properties": [TEXT]}])
def test_a_schema_without_properties_has_no_strings(schema: Any) -> None:
    assert find_strings(schema) == {}


def test_the_models_of_pydantic_are_read() -> None:
    class Period(pydantic.BaseModel):
        kind: str

    class Arguments(pydantic.BaseModel):
        period: Period
        place: str | None = None
        scope: Period | str = "all"

    assert find_strings(Arguments.model_json_schema()) == {"place": ["null"], "scope": ["object"]}


def test_each_reference_is_followed_once() -> None:
    """Otherwise two references in each of 40 definitions would lead to 2^40 places."""
    names = [f"d{number}" for number in range(40)]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}, {"$ref": f"#/$defs/{after}"}]}
        for name, after in zip(names, [*names[1:], "text"], strict=True)
    }
    tool = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**definitions, "text": TEXT}}
    assert find_strings(tool) == {"a": []}


def test_types_within_very_many_alternatives_are_unknown() -> None:
    schema: Any = TEXT
    for _ in range(5_000):
        schema = {"anyOf": [schema]}
    assert find_strings({"properties": {"a": schema, "b": TEXT}}) == {"b": []}
