"""Tests which objects of a JSON schema take no properties but those that they name."""

from typing import Any

import pytest

from conveyor_engine.text.schemas import close_objects

N = {"n": {"type": "integer"}}
OPEN = {"type": "object", "properties": N}
CLOSED = OPEN | {"additionalProperties": False}
CASES: dict[str, tuple[Any, Any]] = {
    "an object": (OPEN, CLOSED),
    "no properties": (
        {"type": "object", "properties": {}},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ),
    "inside": (
        {"$defs": {"d": OPEN}, "anyOf": [OPEN, {"$ref": "#/$defs/d"}], "items": OPEN, "prefixItems": [OPEN, True]},
        {
            "$defs": {"d": CLOSED}, "anyOf": [CLOSED, {"$ref": "#/$defs/d"}], "items": CLOSED,
            "prefixItems": [CLOSED, True],
        },
    ),
    "a property that is called like a keyword": (
        {"properties": {"properties": OPEN, "allOf": N["n"]}},
        {"properties": {"properties": CLOSED, "allOf": N["n"]}, "additionalProperties": False},
    ),
}  # fmt: skip
UNCHANGED: dict[str, Any] = {
    "any object": {"type": "object"},
    "others are asked for": OPEN | {"additionalProperties": True},
    "others of a type": OPEN | {"additionalProperties": {"type": "integer"}},
    "others by pattern": OPEN | {"patternProperties": {"^x": {}}},
    "another is required": OPEN | {"required": ["m"]},
    "all of several": {"allOf": [OPEN, {"properties": {"m": {}}}]},
    "all of several, inside": {"properties": {"a": {"allOf": [OPEN, OPEN]}}},
    "one of several beside": OPEN | {"anyOf": [{"properties": {"m": {}}}]},
    "a reference beside": {"$defs": {"d": OPEN}, "$ref": "#/$defs/d", "properties": {"m": {}}},
    "a condition": {"if": OPEN, "then": {"properties": {"m": {}}}},
    "values": {"enum": [{"properties": {}}], "const": {"properties": {}}},
    "nonsense": {"properties": 5, "anyOf": "x", "items": None, "required": 1},
    "a boolean": True,
}


@pytest.mark.parametrize("case", CASES)
def test_an_object_that_names_its_properties_has_no_others(case: str) -> None:
    given, wanted = CASES[case]
    assert close_objects(given) == wanted


@pytest.mark.parametrize("case", UNCHANGED)
def test_what_may_mean_more_is_left_as_it_is(case: str) -> None:
    assert close_objects(UNCHANGED[case]) == UNCHANGED[case]
