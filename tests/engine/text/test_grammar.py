"""Grammars: what each kind allows, what is refused and why, and answers that stay within their form."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from tests.engine.chat_model import VOCABULARY, write_tokenizer
from tests.engine.text.local_grammars import Grammars

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.scheduling.constraint import Constraint
from conveyor_engine.text.grammar import Kind, build_grammar
from conveyor_engine.text.json_grammar import read_schema
from conveyor_engine.text.parsing.formats import CHANNELS, FORMATS, build_call_or_form, find_forced
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import Thinking

END_ID = 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grammar")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Grammars:
    return Grammars(directory, VOCABULARY, [END_ID, 1])


def allowed(answer: Constraint) -> list[int]:
    mask = answer.build_mask()
    assert len(mask) == VOCABULARY // 8
    return [token_id for token_id in range(VOCABULARY) if mask[token_id // 8] >> token_id % 8 & 1]


def follows(grammars: Grammars, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether the whole text may be an answer."""
    answer = grammars.follow(grammar)
    for token_id in tokenizer.encode(text, 1000):
        if token_id not in allowed(answer):
            return False
        answer.accept(token_id)
    return END_ID in allowed(answer) and 1 in allowed(answer)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        ("json", OBJECT, '{"a": 5}', '{"a": 5.5}'),
        ("json", {"type": "object"}, '{"x": [1, null], "y": {}}', "[1]"),
        ("json", {"enum": ["é", 7]}, '"é"', "8"),
        ("regex", "[ab]+c", "abac", "abad"),
        ("choice", ["yes", 'no "x" \\ é\n', "a|b"], 'no "x" \\ é\n', "a"),
        ("grammar", 'start: "a" B\nB: /[0-9]+/', "a12", "b12"),
        ("grammar", 'root ::= "a" [0-9]+', "a12", "a"),
    ],
)
def test_an_answer_is_of_its_form(
    directory: Path, grammars: Grammars, kind: Kind, value: Any, good: str, bad: str
) -> None:
    grammar, tokenizer = build_grammar(kind, value, "form").text, Tokenizer(directory)
    assert follows(grammars, tokenizer, grammar, good)
    assert not follows(grammars, tokenizer, grammar, bad)


CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 5}}\n</tool_call>'


@pytest.mark.parametrize("text", [CALL, f"{CALL}\n{CALL}"])
def test_a_mark_that_is_one_token_of_the_model_is_written_with_it(tmp_path: Path, text: str) -> None:
    """As Qwen's and Hermes' tokenizers have it; spelt, nothing could come behind it."""
    write_tokenizer(tmp_path)
    trained = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = [tokenizers.AddedToken(mark, special=False, normalized=False) for mark in ("<tool_call>", "</tool_call>")]
    trained.add_tokens(marks)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer, grammars = Tokenizer(tmp_path), Grammars(tmp_path, VOCABULARY, [END_ID, 1])
    _, shape = find_forced("hermes")
    lark = shape.build_grammar([("now", read_schema(OBJECT))], tokenizer.find_id, only_one=False)
    grammar = build_grammar("lark", lark, "tools").text
    ids = tokenizer.encode(text, 1000)
    assert ids.count(tokenizer.find_id("<tool_call>") or 0) == text.count("<tool_call>")
    assert follows(grammars, tokenizer, grammar, text)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json", {"type": "thing"}, "type at #: the value must be one of array"),
        ("json", {"$ref": "https://example.com/schema"}, "$ref at #: 'https://example.com/schema' names a schema"),
        ("regex", "[ab", "unclosed"),
        ("grammar", "start: missing", "missing"),
        ("grammar", 'root ::= "a" [0-9+', "end of input"),
        ("choice", ["a" * 300_000], "more than 262144"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_with_its_field(kind: Kind, value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build_grammar(kind, value, "form")
    assert caught.value.param == "form"
    assert str(caught.value).startswith("form cannot be followed: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_answer_is_complete_when_nothing_else_may_come(grammars: Grammars, directory: Path) -> None:
    answer = grammars.follow(build_grammar("choice", ["ab", "abc"], "form").text)
    for letter, complete in (("a", False), ("b", False), ("c", True)):
        answer.accept(Tokenizer(directory).encode(letter, 9)[0])
        assert answer.is_complete == complete
    assert allowed(answer) == [END_ID, 1]


def test_answers_of_one_grammar_do_not_disturb_each_other(grammars: Grammars, directory: Path) -> None:
    grammar = build_grammar("choice", ["ab", "cd"], "form").text
    first, second = grammars.follow(grammar), grammars.follow(grammar)
    before = allowed(second)
    first.accept(Tokenizer(directory).encode("a", 9)[0])
    assert allowed(second) == before != allowed(first)


@pytest.mark.parametrize("form", ["ab", ""])
@pytest.mark.parametrize("budget", [0, 2])
def test_thinking_ends_where_its_budget_does(grammars: Grammars, directory: Path, form: str, budget: int) -> None:
    begin, end = 300, 301
    letter = Tokenizer(directory).encode("a", 9)[0]
    grammar = build_grammar("regex", form, "form").text if form else ""
    answer = grammars.follow(grammar, Thinking(begin, end, False, budget))
    answer.accept(begin)
    for _ in range(budget):
        assert letter in allowed(answer)
        answer.accept(letter)
    assert allowed(answer) == [end]
    answer.accept(end)
    assert allowed(answer) == ([letter] if form else list(range(VOCABULARY)))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_grammar_begins_behind_the_thinking(grammars: Grammars, directory: Path, has_begun: bool) -> None:
    begin, end = 300, 301
    letter = Tokenizer(directory).encode("a", 9)[0]
    answer = grammars.follow(build_grammar("regex", "ab", "form").text, Thinking(begin, end, has_begun))
    if not has_begun:
        assert allowed(answer) == sorted([letter, begin])
        answer.accept(begin)
    for token_id in (letter, begin, letter):
        assert set(allowed(answer)) == set(range(VOCABULARY)) - {END_ID, 1}, "all but an end"
        answer.accept(token_id)
        assert not answer.is_complete
    answer.accept(end)
    assert allowed(answer) == [letter]
    for text in "ab":
        answer.accept(Tokenizer(directory).encode(text, 9)[0])
    assert answer.is_complete


def test_an_answer_that_does_not_think_at_once_may_not_think_later(grammars: Grammars, directory: Path) -> None:
    answer = grammars.follow(build_grammar("regex", "ab", "form").text, Thinking(300, 301, False))
    for text in "ab":
        assert not answer.is_complete
        token_id = Tokenizer(directory).encode(text, 9)[0]
        assert token_id in allowed(answer)
        answer.accept(token_id)
        assert 300 not in allowed(answer)
    assert answer.is_complete


SCHEMAS: list[dict[str, Any]] = [
    OBJECT,
    {"type": "array", "items": {"enum": ["red", "green", 1, None]}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "integer", "minimum": 3, "maximum": 12}, {"type": "boolean"}]},
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"day": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}},
    },
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "string", "format": "date"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_a_model_says_is_valid_by_its_schema(grammars: Grammars, directory: Path, schema: Any) -> None:
    """Here it says random tokens; what is not finished in time is not looked at."""
    grammar, tokenizer = build_grammar("json", schema, "form").text, Tokenizer(directory)
    finished = 0
    for seed in range(40):
        choose = random.Random(seed)
        answer, ids = grammars.follow(grammar), [0]
        ids.clear()
        while len(ids) < 300 and not answer.is_complete:
            may = allowed(answer)
            assert may, "a row without a token to choose would end in an error"
            if END_ID in may and choose.random() < 0.3:
                break
            ids.append(choose.choice([token_id for token_id in may if token_id > 2] or may))
            answer.accept(ids[-1])
        if answer.is_complete or END_ID in allowed(answer):
            finished += 1
            text = b"".join(map(tokenizer.token_bytes, ids)).decode()
            jsonschema.validate(json.loads(text), schema)
    assert finished > 5


CALL_OF_EACH_FORMAT = {
    "gemma4": "<|tool_call>call:now{a:5}<tool_call|>",
    "functiongemma": "<start_function_call>call:now{a:5}<end_function_call>",
    "seed_oss": "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
    "deepseek_v4": '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="now">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}",
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "now", "parameters": {"a": 5}}]<|END_ACTION|>',
    "jamba": '<tool_calls>[{"name": "now", "arguments": {"a": 5}}]</tool_calls>',
    "internlm": '<|action_start|><|plugin|>\n{"name": "now", "parameters": {"a": 5}}<|action_end|>',
    "longcat": '<longcat_tool_call>\n{"name": "now", "arguments": {"a": 5}}\n</longcat_tool_call>',
    "phi4_mini_json": 'functools[{"name": "now", "arguments": {"a": 5}}]',
    "olmo3": "<function_calls>\nnow(a=5)\n</function_calls>",
    "hermes": CALL,
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS]now[ARGS]{"a": 5}',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
    "llama3_json": '{"name": "now", "parameters": {"a": 5}}; {"name": "now", "parameters": {"a": 5}}',
    "list": '[{"name": "now", "arguments": {"a": 5}}]',
    "llama4_pythonic": "[now(a=5)]",
    "glm45": "<tool_call>now\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "granite": '<|tool_call|>[{"name": "now", "arguments": {"a": 5}}]',
    "lfm2": "<|tool_call_start|>[now(a=5)]<|tool_call_end|>",
}


MARK = re.compile(r"｜DSML｜|<(?!/?｜DSML)[^ =<>]+>|\[[A-Z_]+\]")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != CHANNELS])
@pytest.mark.parametrize(("tokens", "special"), [("(?!)", False), (">\n", False), (MARK, False), (MARK, True)])
@pytest.mark.parametrize(("kind", "form", "answer"), [("json", OBJECT, '{"a": 5}'), ("choice", ["yes", "no"], "no")])
def test_an_answer_is_a_call_in_any_format_or_follows_the_form(
    tmp_path: Path, name: str, tokens: str | re.Pattern[str], special: bool, kind: Kind, form: Any, answer: str
) -> None:
    write_tokenizer(tmp_path)
    trained = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = re.findall(tokens, CALL_OF_EACH_FORMAT[name])
    trained.add_tokens([tokenizers.AddedToken(mark, special=special, normalized=False) for mark in marks])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer, grammars = Tokenizer(tmp_path), Grammars(tmp_path, VOCABULARY, [END_ID, 1])
    grammar = build_call_or_form(name, ["now"], build_grammar(kind, form, "form").text, tokenizer.find_id)
    for text in (CALL_OF_EACH_FORMAT[name], answer):
        assert follows(grammars, tokenizer, grammar, text)
        for space in (" ", "\n", "\r\n\t\n"):
            assert follows(grammars, tokenizer, grammar, space + text) == (kind == "json")
    assert not follows(grammars, tokenizer, grammar, "It is sunny.")


@pytest.mark.parametrize("name", CALL_OF_EACH_FORMAT)
def test_an_array_that_is_no_call_follows_the_form(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    tokenizer, grammars = Tokenizer(tmp_path), Grammars(tmp_path, VOCABULARY, [END_ID, 1])
    form = build_grammar("json", {"type": "array", "items": {"type": "integer"}}, "form").text
    grammar = build_call_or_form(name, ["now"], form, tokenizer.find_id)
    assert follows(grammars, tokenizer, grammar, "[5, 5]")
    assert not follows(grammars, tokenizer, grammar, '["It is sunny."]')
