"""Every keyword of JSON Schema: random answers are valid by a validator, or the engine refuses the schema."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.engine.chat_model import VOCABULARY, write_tokenizer
from tests.engine.text.local_grammars import Grammars, answer_by_chance

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.text.grammar import build_grammar
from conveyor_engine.text.tokenizer import Tokenizer

END_ID = 0
SEEDS = 6
TOKENS_MAX = 300
INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind", "lives"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog", "default": "dog"}, "age": {"type": "number"}}}
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
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
    {"type": "object", "properties": {"ab": {"type": "string", "maxLength": 5}},
     "patternProperties": {"^a": {"minLength": 3}}, "additionalProperties": False},
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
    {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG},
     "discriminator": {"propertyName": "kind"}},
    {"type": "array", "items": {"oneOf": [CAT, DOG]}, "maxItems": 2},
    {"$ref": "#/definitions/a%20b", "maximum": 6, "definitions": {"a b": {"type": "integer", "minimum": 5}}},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "deprecated": True, "$comment": "c", **INTEGER},
    {"$defs": {"n": {"type": "object", "properties": {"v": INTEGER, "next": {"anyOf": [{"type": "null"},
     {"$ref": "#/$defs/n"}]}}, "required": ["v", "next"], "additionalProperties": False}}, "$ref": "#/$defs/n"},
]  # fmt: skip
REFUSED: list[Any] = [
    {"oneOf": [{**INTEGER, "minimum": 1, "maximum": 6}, {**INTEGER, "minimum": 4, "maximum": 9}]},
    {"oneOf": [INTEGER, {"type": "number"}]},
    {"oneOf": [{"type": "string"}, {"const": "a"}]},
    {"oneOf": [A, {**A, "properties": {"a": INTEGER, "b": INTEGER}}]},
    {"oneOf": [CAT | {"type": ["object", "null"]}, DOG | {"type": ["object", "null"]}]},
    {"oneOf": [{"enum": [1, 2.0]}, {"enum": [2, 3]}]},
    {"properties": {"x": {"oneOf": [{"type": "array"}, {"type": "array", "items": INTEGER}]}}},
    {"not": INTEGER},
    {"if": INTEGER, "then": {"minimum": 3}},
    {"type": "array", "items": INTEGER, "uniqueItems": True},
    {"type": "array", "contains": INTEGER},
    {"type": "array", "unevaluatedItems": False, "prefixItems": [INTEGER]},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "dependentSchemas": {"a": B}},
    {"dependencies": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False, "properties": {"a": INTEGER}},
    {"$dynamicRef": "#a", "$defs": {"q": {"$dynamicAnchor": "a", **INTEGER}}},
    {"type": "object", "properties": {"a": INTEGER}, "minProperties": 1, "additionalProperties": True},
    {"type": "object", "patternProperties": {"^a": INTEGER, "b$": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "string", "format": "iri"},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keywords")
    write_tokenizer(folder)
    return folder


def check(directory: Path, schema: Any, seeds: int) -> None:
    grammars, tokenizer = Grammars(directory, VOCABULARY, [END_ID]), Tokenizer(directory)
    grammar = build_grammar("json", schema, "form")
    answers = [
        answer_by_chance(grammars, grammar, random.Random(seed), END_ID, VOCABULARY, TOKENS_MAX)
        for seed in range(seeds)
    ]
    ended = [json.loads(tokenizer.decode(tokens)) for tokens in answers if tokens is not None]
    assert ended, "some answers end"
    for value in ended:
        jsonschema.validate(value, schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_answers_are_valid_by_the_schema(directory: Path, schema: Any) -> None:
    check(directory, schema, SEEDS)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("schema", KEPT, ids=json.dumps)
def test_many_answers_are_valid_by_the_schema(directory: Path, schema: Any) -> None:
    check(directory, schema, 30 * SEEDS)


@pytest.mark.parametrize("schema", REFUSED, ids=json.dumps)
def test_a_schema_that_answers_could_violate_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidRequest, match="form cannot be followed: "):
        build_grammar("json", schema, "form")


def test_numbers_at_the_bounds_are_valid(directory: Path) -> None:
    """Random answers seldom are at a bound, so each number at or near one is tried."""
    grammars, tokenizer = Grammars(directory, VOCABULARY, [END_ID]), Tokenizer(directory)
    values = (-2.5, -2, -0.5, 0, 0.25, 1, 1.5, 2)
    near = [value + step for value in values for step in (-0.1, 0, 0.1)]
    texts = sorted({f"{value:.{digits}f}" for value in near for digits in (0, 1, 2)})
    for low in values:
        for high in (each for each in values if each > low):
            for least, most in (("exclusiveMinimum", "maximum"), ("minimum", "exclusiveMaximum")):
                schema = {"type": "number", least: low, most: high}
                grammar = build_grammar("json", schema, "form")
                for text in texts:
                    if follows(grammars, tokenizer, grammar, text):
                        jsonschema.validate(json.loads(text), schema)


def follows(grammars: Grammars, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    answer = grammars.follow(grammar)
    for token_id in [*tokenizer.encode(text, 100), END_ID]:
        if not answer.build_mask()[token_id // 8] >> token_id % 8 & 1:
            return False
        answer.accept(token_id)
    return True


def nest(depth: int) -> dict[str, Any]:
    """A schema whose references lead to one another."""
    steps = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(depth)}
    return {"$defs": {**steps, f"d{depth}": INTEGER}, "$ref": "#/$defs/d0"}


def test_schemas_that_lead_too_deep_are_refused(directory: Path) -> None:
    assert build_grammar("json", nest(100), "form")
    for depth in (300, 5_000):
        with pytest.raises(InvalidRequest, match="more than 256 levels deep"):
            build_grammar("json", nest(depth), "form")


CHAIN = "start: r0\n" + "\n".join(f'r{number}: "x" r{number + 1}' for number in range(2_673)) + '\nr2673: "y"'
AND = " & ".join(f"/(?s:.*)[a-z]{{{number}}}(?s:.*)/" for number in range(1, 30))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CHAIN, "has 2675 rules, more than 1024"),
        (f"start: A\nA: {AND}", "has 28 intersections of terminals, more than 16"),
        ("start: " + "(" * 129 + '"a"' + ")" * 129, "more than 128 levels deep"),
    ],
    ids=["rules", "intersections", "brackets"],
)
def test_grammars_that_cost_too_much_to_compile_are_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        build_grammar("grammar", text, "form")


def test_what_a_text_contains_counts_for_nothing() -> None:
    assert build_grammar("grammar", f'start: "{"&~((" * 100}" /[&(]+/ // {"&" * 50}', "form")


def test_equal_branches_are_compiled_once() -> None:
    one, many = ({"anyOf": [{"type": "string"}] * times + [INTEGER]} for times in (1, 200))
    assert build_grammar("json", one, "form") == build_grammar("json", many, "form")
