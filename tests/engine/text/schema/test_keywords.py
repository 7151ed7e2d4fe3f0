"""Every keyword of JSON Schema: random answers are valid by a validator, or the keyword is relaxed and named."""

import json
import re
from itertools import product
from typing import Any

import jsonschema
import pytest
from tests.engine.chat_model import write_tokenizer
from tests.engine.text.schema.samples import Sampler

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.text.grammar import build_grammar

SEEDS = 6
TOKENS_MAX = 300
INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog", "default": "dog"}, "age": {"type": "number"}}}
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
CONTAINS_3 = {"type": "array", "contains": {"type": "array", "contains": {"type": "array", "contains": INTEGER}}}


def nest_names(depth: int) -> Any:
    """Return a schema that becomes larger by a factor of eight with each level."""
    inner = nest_names(depth - 1) if depth else INTEGER
    return {"type": "object", "propertyNames": {"enum": list("abcdefgh")}, "additionalProperties": inner}


KEPT: list[Any] = [
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
    {"type": "number", "exclusiveMinimum": 2, "exclusiveMaximum": 2.25},
    {"type": "number", "exclusiveMinimum": -3, "exclusiveMaximum": 1},
    {"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]},
    {"$ref": "#/$defs/x", "maximum": 0.25, "$defs": {"x": {"type": "number", "exclusiveMinimum": 0}}},
    {"type": "number", "exclusiveMinimum": 123456789012, "maximum": 123456789012.5},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 2},
    {"type": "integer", "multipleOf": 3, "minimum": 5, "maximum": 30},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4},
    *({"type": "string", "format": name} for name in FORMATS),
    {"type": ["string", "null", "integer"], "maxLength": 3, "maximum": 3},
    {"const": {"a": [1, 2.5, "é\n"]}},
    {"enum": [1, "a", None, [1], {"b": 2}]},
    {"type": "integer", "enum": [1, "a", 4], "minimum": 2},
    {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [INTEGER, {"type": "boolean"}], "items": False},
    {"type": "array", "prefixItems": [INTEGER], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"a": INTEGER, "b": {"type": "null"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": False, "b": INTEGER}, "required": ["b"]},
    {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False},
    {
        "type": "object",
        "properties": {"ab": {"type": "string", "maxLength": 5}},
        "patternProperties": {"^a": {"minLength": 3}},
        "additionalProperties": False,
    },
    {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "integer", "multipleOf": 2}, {"multipleOf": 3, "minimum": 1, "maximum": 30}]},
    {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
    {"allOf": [A, B]},
    {"anyOf": [{"type": "integer", "maximum": 5}, {"type": "boolean"}, {"type": "boolean", "title": "again"}]},
    {"type": "integer", "anyOf": [{"minimum": 5, "maximum": 7}, {"maximum": 3, "minimum": 1}]},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "exclusiveMinimum": 3}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3, "maxLength": 5}, INTEGER]},
    {"oneOf": [{"const": 1}, {"enum": ["1", True]}, {"type": "array", "items": INTEGER, "maxItems": 2}]},
    {"oneOf": [A, B]},
    {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {"cat": CAT, "dog": DOG},
        "discriminator": {"propertyName": "kind"},
    },
    {"type": "array", "items": {"oneOf": [CAT, DOG]}, "maxItems": 2},
    {"$ref": "#/definitions/a%20b", "maximum": 6, "definitions": {"a b": {"type": "integer", "minimum": 5}}},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": "c", **INTEGER},
    {
        "$defs": {
            "n": {
                "type": "object",
                "properties": {"v": INTEGER, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/n",
    },
]
KEPT += [
    {"oneOf": [{**INTEGER, "minimum": 1, "maximum": 6}, {**INTEGER, "minimum": 4, "maximum": 9}]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"const": "a"}]},
    {"oneOf": [{"enum": [1, 2.0]}, {"enum": [2, 3]}]},
    {"type": "array", "items": INTEGER, "maxItems": 3, "oneOf": [{"minItems": 2}, {"maxItems": 2}]},
    {"not": {"type": ["string", "array", "object", "number"]}},
    {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 4, 5]}},
    {"type": "string", "maxLength": 2, "not": {"enum": ["", "a"]}},
    {"type": "boolean", "not": {"const": True}},
    {"type": "array", "items": INTEGER, "maxItems": 2, "not": {"const": []}},
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "not": {"required": ["a", "b"]}},
    {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "not": {"properties": {"a": {"maximum": 1}}}},
    {"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "null"}},
    {
        "type": "object",
        "properties": {"k": {"enum": ["x", "y"]}, "a": INTEGER, "b": INTEGER},
        "required": ["k"],
        "if": {"properties": {"k": {"const": "x"}}},
        "then": {"required": ["a"]},
        "else": {"required": ["b"]},
    },
    {
        "type": "object",
        "properties": {"k": {"enum": ["x", "y", "z"]}, "a": INTEGER, "b": INTEGER},
        "required": ["k"],
        "allOf": [
            {"if": {"properties": {"k": {"const": each}}}, "then": then}
            for each, then in (
                ("x", {"required": ["a"]}),
                ("y", {"required": ["b"]}),
                ("z", {"not": {"required": ["a"]}}),
            )
        ],
    },
    {"type": "array", "items": {"enum": ["a", "b", 3]}, "uniqueItems": True, "minItems": 2},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "$defs": {"e": {"enum": [1, 1.0, True]}}},
    {"type": "array", "items": INTEGER, "uniqueItems": True, "maxItems": 1},
    {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "maxItems": 4},
    {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 2, "maxContains": 3},
    {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}, "minContains": 0, "maxContains": 1},
    {"type": "array", "unevaluatedItems": False, "prefixItems": [INTEGER]},
    {"type": "array", "allOf": [{"prefixItems": [INTEGER]}], "unevaluatedItems": {"type": "boolean"}},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"pattern": "^a"}, "properties": {"b": INTEGER, "ab": INTEGER}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["a"]},
    {"type": "object", "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"minLength": 2, "maxLength": 3}}},
    {"type": "object", "propertyNames": {"maxLength": 2}, "unevaluatedProperties": INTEGER},
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "dependentSchemas": {"a": B}},
    {"properties": {"a": INTEGER, "b": INTEGER}, "dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False, "properties": {"a": INTEGER}},
    {
        "allOf": [{"properties": {"a": INTEGER}}, {"$ref": "#/$defs/b"}],
        "unevaluatedProperties": False,
        "$defs": {"b": B},
    },
    {"$dynamicRef": "#a", "$defs": {"q": {"$dynamicAnchor": "a", **INTEGER}}},
    {"$ref": "#here", "$defs": {"q": {"$anchor": "here", **INTEGER}}},
    {"$id": "urn:x:y", "$ref": "urn:x:y#/$defs/q", "$defs": {"q": INTEGER}},
    {"$ref": "#/components/schemas/q", "components": {"schemas": {"q": INTEGER}}},
    *(
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}, "required": ["c"], **limits}
        for limits in (
            {"minProperties": 2},
            {"maxProperties": 2},
            {"minProperties": 2, "maxProperties": 2},
            {"minProperties": 2, "additionalProperties": True},
            {"minProperties": 2, "maxProperties": 3, "additionalProperties": INTEGER},
        )
    ),
    {"type": "object", "patternProperties": {"^a": INTEGER, "^b": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": INTEGER, "b$": INTEGER}, "additionalProperties": False},
    {"type": "string", "pattern": "^(?=.*[0-9])(?=.*[a-c])[a-c0-9]{2,4}$"},
    {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"},
    {"type": "string", "pattern": "^[\\w.-]+\\/a{2}.$", "maxLength": 9},
    {"type": "string", "format": "ticket", "maxLength": 3},
    {"type": "integer", "format": "int32", "exclusiveMinimum": 2147483640},
    {"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.75, "multipleOf": 0.25},
    # two parts of an object that are described in several places, and references that lead to themselves
    {"allOf": [{"properties": {"a": A}}, {"properties": {"a": B}}], "required": ["a"]},
    {
        "$defs": {"n": {"properties": {"v": INTEGER, "n": {"type": "object", "$ref": "#/$defs/n"}}, "required": ["v"]}},
        "type": "object",
        "$ref": "#/$defs/n",
    },
    {
        "anyOf": [{"$ref": "#/$defs/no"}, INTEGER],
        "$defs": {"no": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/no"}}},
    },
]
RELAXED: list[tuple[Any, str, str]] = [
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "minProperties", "#"),
    ({"oneOf": [A, {**A, "properties": {"a": INTEGER, "b": INTEGER}}]}, "oneOf", "#"),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER, "c": {}}, "allOf": [{"maxProperties": 2}]},
        "maxProperties",
        "#/allOf/0",
    ),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "oneOf", "#"),
    (
        {"properties": {"x": {"oneOf": [{"type": "array"}, {"type": "array", "items": {"pattern": "a"}}]}}},
        "oneOf",
        "#/properties/x",
    ),
    ({"not": INTEGER}, "not", "#"),
    ({"type": "string", "maxLength": 3, "not": {"pattern": "^b"}}, "not", "#"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "uniqueItems", "#"),
    (
        {"type": "object", "properties": {"a~/b": {"type": "array", "uniqueItems": True}}},
        "uniqueItems",
        "#/properties/a~0~1b",
    ),
    ({"type": "object", "patternProperties": {"^a": INTEGER, "b$": {"type": "boolean"}}}, "patternProperties", "#"),
    ({"type": "string", "pattern": "^(?!foo)[a-z]{3}$"}, "pattern", "#"),
    ({"type": "string", "pattern": "\\bx"}, "pattern", "#"),
    ({"type": "string", "pattern": "x^y"}, "pattern", "#"),
    ({"type": "object", "propertyNames": {"not": {"const": "a"}}}, "propertyNames", "#"),
    ({"type": "number", "multipleOf": 1e10}, "multipleOf", "#"),
    ({"type": "array", "contains": INTEGER, "minContains": 10**9}, "contains", "#"),
    ({"type": "array", "contains": INTEGER, "minContains": 1e300}, "contains", "#"),
    ({"type": "array", "contains": CONTAINS_3}, "contains", "#"),
    ({"type": "string", "not": {"const": "x" * 2_000}}, "not", "#"),
    (
        {"$defs": {"a": {"type": "array", "uniqueItems": True}}, "items": {"$ref": "#/$defs/a"}},
        "uniqueItems",
        "#/$defs/a",
    ),
]
REFUSED: list[tuple[Any, str]] = [
    ({"properties": {"a": {"type": "thing"}}}, "type at #/properties/a: the value must be one of"),
    ({"items": [{"minLength": "5"}]}, "minLength at #/items/0: the value must be a whole number that is not negative"),
    ({"anyOf": "x"}, "anyOf at #: the value must be a list of schemas"),
    (
        {"properties": {"a": {"$ref": "#/$defs/no"}}},
        "$ref at #/properties/a: '#/$defs/no' names a schema that is not there",
    ),
    ({"$ref": "https://example.com/x"}, "the engine loads no other document"),
    ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1}, "at #: no value fits"),
    ({"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}}, "at #/properties/a: no value fits"),
    ({"not": {}}, "at #: no value fits"),
    ({"type": "string", "minLength": 10**400}, "minLength at #: the value must be a whole number"),
    ({"type": "integer", "minimum": 10**400}, "minimum at #: the value must be a number"),
    ({"$ref": f"#/prefixItems/{'9' * 5_000}", "prefixItems": [True]}, "$ref at #: '#/prefixItems/999"),
    (
        {"$id": "http://[x", "$ref": "http://[y"},
        "$ref at #: 'http://[y' names a schema that is not there: the engine loads no other document",
    ),
    (
        {"$defs": {"x": {"$id": "http://[x", "type": "array"}}, "$dynamicRef": "http://[x", "minLength": 10**400},
        "minLength at #: the value must be a whole number",
    ),
    (nest_names(20), "at #: it leads to more than 50000 schemas"),
    ({"$ref": "#"}, "$ref at #: it refers to itself without an end, so no value fits"),
    (
        {
            "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
            "items": {"$ref": "#/$defs/n"},
            "minItems": 1,
            "type": "array",
        },
        "$ref at #/$defs/n: it refers to itself",
    ),
]


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Sampler:
    folder = tmp_path_factory.mktemp("keywords")
    write_tokenizer(folder)
    return Sampler(folder)


@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_answers_are_valid_by_the_schema(sampler: Sampler, schema: Any) -> None:
    assert build_grammar("json", schema, "form").relaxed == []
    sampler.check(schema, SEEDS)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_many_answers_are_valid_by_the_schema(sampler: Sampler, schema: Any) -> None:
    sampler.check(schema, 30 * SEEDS)


@pytest.mark.parametrize(("schema", "keyword", "pointer"), RELAXED)
def test_a_keyword_that_answers_might_not_follow_is_named(
    sampler: Sampler, schema: Any, keyword: str, pointer: str
) -> None:
    assert set(build_grammar("json", schema, "form").relaxed) == {(keyword, pointer)}
    assert sampler.sample(schema, SEEDS, TOKENS_MAX), "some answers end"
    with pytest.raises(InvalidRequest, match=re.escape(f"form cannot be followed: {keyword} at {pointer}: ")):
        build_grammar("json", schema, "form", strict=True)


@pytest.mark.parametrize(("schema", "words"), REFUSED)
def test_a_schema_that_is_wrong_or_that_no_value_fits_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_grammar("json", schema, "form")
    assert words in str(caught.value)


def test_numbers_at_the_bounds_are_valid(sampler: Sampler) -> None:
    """Random answers seldom are at a bound, so each number at or near one is tried."""
    values = (-2.5, -2, -0.5, 0, 0.25, 1, 1.5, 2)
    near = [value + step for value in values for step in (-0.1, 0, 0.1)]
    texts = sorted({f"{value:.{digits}f}" for value in near for digits in (0, 1, 2)})
    for low in values:
        for high in (each for each in values if each > low):
            for least, most in product(("exclusiveMinimum", "minimum"), ("maximum", "exclusiveMaximum")):
                for kind in ("number", "integer"):
                    schema = {"type": kind, least: low, most: high}
                    if kind == "number" or any(
                        jsonschema.Draft202012Validator(schema).is_valid(n) for n in range(-3, 4)
                    ):
                        check_texts(sampler, schema, texts)


def check_texts(sampler: Sampler, schema: Any, texts: list[str]) -> None:
    """Check that the grammar allows no text that is not valid, and no fewer integers than are valid."""
    validator = jsonschema.Draft202012Validator(schema)
    for text, may in zip(texts, sampler.may(schema, texts), strict=True):
        is_valid = validator.is_valid(json.loads(text))
        assert not may or is_valid, (schema, text)
        if schema["type"] == "integer" and "." not in text and text != "-0":
            assert may == is_valid, (schema, text)


@pytest.mark.parametrize("number", [101, 1_000])
def test_an_all_of_of_many_objects_is_followed(sampler: Sampler, number: int) -> None:
    objects = [
        {"type": "object", "properties": {f"p{each}": {"type": "null"}}, "required": [f"p{each}"]}
        for each in range(number)
    ]
    beside = {"properties": {"p0": {"type": "null"}, "a": INTEGER}}
    schema = {"allOf": [*objects, beside, {"required": ["a"]}]}
    whole = {"p0": None, "a": 1, **{f"p{each}": None for each in range(1, number)}}
    assert build_grammar("json", schema, "form").relaxed == []
    if number == 101:
        without_last = {name: value for name, value in whole.items() if name != "p100"}
        assert sampler.may(schema, [json.dumps(each) for each in (whole, without_last, {**whole, "b": 1})]) == [
            True, False, False,
        ]  # fmt: skip


@pytest.mark.parametrize(
    "pattern", [r"^(a+)+$", r"^(a|a)*$", r"^(?:a|aa)+$", r"(.*a){20}$", "(?=a)" * 10_000 + "[|]", f"[{'-' * 60_000}a]"]
)
def test_a_costly_pattern_costs_little(pattern: str) -> None:
    """A backtracking engine would take years for the first four, and steps without number for the others."""
    name = "a" * 60 + "b"
    schema = {"type": "object", "properties": {name: INTEGER}}
    for names in ({"propertyNames": {"pattern": f"{pattern}"}}, {"patternProperties": {pattern: INTEGER}}):
        build_grammar("json", {**schema, **names}, "form")


def test_names_are_compared_with_patterns_as_the_library_does(sampler: Sampler) -> None:
    schema = {
        "type": "object",
        "properties": dict.fromkeys(("a1", "aé", "b"), INTEGER),
        "propertyNames": {"pattern": r"^a\w$"},
    }
    assert sampler.may(schema, ['{"a1": 1}', '{"aé": 1}', '{"b": 1}']) == [True, False, False]


def test_too_many_names_beside_a_pattern_are_not_compared() -> None:
    schema = {
        "type": "object", "properties": dict.fromkeys(map(str, range(2_000)), INTEGER),
        "propertyNames": {"pattern": "^[0-9]+$"},
    }  # fmt: skip
    assert build_grammar("json", schema, "form").relaxed == [("propertyNames", "#")]
