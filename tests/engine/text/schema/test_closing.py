"""Tests which objects of a JSON schema have no properties but those that they name."""

from typing import Any

import pytest

from conveyor_engine.text.schema.prepare import prepare

N = {"n": {"type": "integer"}}
OPEN = {"type": "object", "properties": N}
CLOSED = OPEN | {"additionalProperties": False}
M = {"properties": {"m": True}}
CASES: dict[str, tuple[Any, Any]] = {
    "an object": (OPEN, CLOSED),
    "no properties": (
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ),
    "inside": (
        {"$defs": {"d": OPEN}, "anyOf": [OPEN, {"$ref": "#/$defs/d"}, {"items": OPEN, "prefixItems": [OPEN, True]}]},
        {
            "anyOf": [CLOSED, {"$ref": "#/$defs/0"}, {"items": CLOSED, "prefixItems": [CLOSED, True]}],
            "$defs": {"0": CLOSED},
        },
    ),
    "a property that is called like a keyword": (
        {"properties": {"properties": OPEN, "allOf": N["n"]}},
        {"properties": {"properties": CLOSED, "allOf": N["n"]}, "additionalProperties": False},
    ),
    "all of several": (
        {"allOf": [OPEN, M]},
        {"allOf": [OPEN, M], "properties": {"m": True, "n": True}, "additionalProperties": False},
    ),
    "all of several, inside": (
        {"properties": {"a": {"allOf": [OPEN, M]}}},
        {
            "properties": {
                "a": {"allOf": [OPEN, M], "properties": {"m": True, "n": True}, "additionalProperties": False}
            },
            "additionalProperties": False,
        },
    ),
    "one of several beside": (
        OPEN | {"anyOf": [M]},
        {"type": "object", "properties": {**N, "m": True}, "anyOf": [M], "additionalProperties": False},
    ),
    "a property that is described twice": (
        {"allOf": [{"properties": {"a": OPEN}}], "properties": {"a": M}},
        {"allOf": [{"properties": {"a": OPEN}}], "properties": {"a": M}, "additionalProperties": False},
    ),
}
UNCHANGED: dict[str, Any] = {
    "any object": {"type": "object"},
    "others are asked for": OPEN | {"additionalProperties": True},
    "others of a type": OPEN | {"additionalProperties": {"type": "integer"}},
    "others by pattern": OPEN | {"patternProperties": {"^x": {}}},
    "another is required": OPEN | {"required": ["m"]},
    "another is required beside": {"allOf": [OPEN, {"required": ["m"]}]},
    "more are required than have names": OPEN | {"minProperties": 2, "required": ["n"]},
    "values": {"enum": [{"properties": {}}], "const": {"properties": {}}},
}


def rewrite(schema: Any) -> Any:
    return prepare(schema, lambda _: True).schema


@pytest.mark.parametrize("case", CASES)
def test_an_object_that_names_its_properties_has_no_others(case: str) -> None:
    given, expected = CASES[case]
    assert rewrite(given) == expected


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_may_mean_more_is_left_as_it_is(case: str) -> None:
    assert rewrite(UNCHANGED[case]) == UNCHANGED[case]
