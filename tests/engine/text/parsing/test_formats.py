"""Calls of tools as each family of models writes them: what is read, for any chunks, and what of it is text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.text.parsing.examples import (
    ALL,
    ALL_END,
    BEGIN,
    END,
    EXAMPLES,
    KIMI_ALL,
    KIMI_ALL_END,
    KIMI_BEGIN,
    KIMI_END,
    KIMI_SEP,
    SEP,
    join_parts,
)

from conveyor_engine.text.parsing.build import Parsing, build_parser
from conveyor_engine.text.parsing.formats import CHANNELS, COMMAND, FORMATS, find_format
from conveyor_engine.text.parsing.interface import Part
from conveyor_engine.text.parsing.xml_calls import Strings

STRINGS: Strings = {"get_weather": {"city": []}, "write": {"text": []}}


def read(tool_format: str, chunks: list[str], **fields: Any) -> list[Part]:
    parser = build_parser(Parsing(tool_format=tool_format, strings=STRINGS, **fields))
    return join_parts(parser, chunks)


def content_of(parts: list[Part]) -> str:
    return "".join(text for field, text in parts if field == "content")


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    calls = list[tuple[str, Any]]()
    for field, text in parts:
        if field == "tool_call":
            calls.append((text, None))
        elif field == "arguments":
            calls[-1] = calls[-1][0], json.loads(text)
    return calls


@pytest.mark.parametrize(("tool_format", "answer", "content", "calls"), EXAMPLES)
def test_an_answer_is_divided_into_content_and_calls(
    tool_format: str, answer: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for chunks in ([answer], list(answer)):
        parts = read(tool_format, chunks)
        assert content_of(parts) == content
        assert calls_of(parts) == calls


def test_arguments_are_those_that_the_model_wrote_to_the_letter() -> None:
    arguments = '{ "a" :1e5,"b":"\\u00e9"  }'
    parts = read("hermes", [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    assert parts == [("tool_call", "f"), ("arguments", arguments)]


@pytest.mark.parametrize(
    ("tool_format", "answer", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', '{"a": "b'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1\n</tool_call>', '{"a": [1\n'),
        ("llama4_pythonic", "[f(a='b', c=[1", '{"a": "b", "c": [1'),
        ("llama4_pythonic", "[f(a='\\x4", '{"a": "\\\\x4'),
        ("qwen3_coder", "<function=f><parameter=a>\nb", '{"a": '),
        ("qwen3_coder", "<function=write><parameter=text>\nb", '{"text": "b'),
        ("kimi_k2", f'{KIMI_BEGIN}functions.f:0{KIMI_SEP}{{"a": "b', '{"a": "b'),
        ("kimi_k2", f'{KIMI_BEGIN}functions.f:0{KIMI_SEP}{{"a": 1{KIMI_END}', '{"a": 1'),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">b</｜DSML',
            '{"a": "b</｜DSML',
        ),
        ("gemma4", '<|tool_call>call:f{a:1,b:<|"|>c', '{"a": 1, "b": "c'),
        ("olmo3", "<function_calls>f(a='b', c=[1", '{"a": "b", "c": [1'),
        (CHANNELS, '<|channel|>commentary to=functions.f<|message|>{"a": "b', '{"a": "b'),
    ],
)
def test_a_cut_or_broken_call_is_not_fixed(tool_format: str, answer: str, arguments: str) -> None:
    parts = read(tool_format, [answer])
    assert parts[0][0] == "tool_call"
    assert parts[1] == ("arguments", arguments)


def test_only_one_call_is_reported_if_parallel_calls_are_off() -> None:
    answer = "".join(f'<tool_call>{{"name": "f{n}", "arguments": {{}}}}</tool_call>' for n in range(3)) + "x"
    parts = read("hermes", list(answer), only_one_call=True)
    assert parts == [("tool_call", "f0"), ("arguments", "{}"), ("content", "x")]


def test_arguments_are_streamed_while_they_arrive() -> None:
    parser = build_parser(Parsing(tool_format="hermes"))
    assert parser.feed('<tool_call>\n{"name": "f", "arg') == []
    assert parser.feed('uments": {"a') == [("tool_call", "f"), ("arguments", '{"a')]
    assert parser.feed('": 1') == [("arguments", '": 1')]
    assert parser.feed("}}\n</tool") == [("arguments", "}")]
    assert parser.feed("_call>") == parser.finish() == []


PIECES = sorted({
    *"{}[]()<>:,;=\"'\\ \n.a1ntu", "name", '"name"', '"arguments"', '"parameters": {', "True", "é", "function=",
    '"f"', "f(a=", "\\u0041", "```json\n", "|python_tag|>", "parameter=a>", ">", "</parameter>", "</function>",
    *(text for _, answer, _, _ in EXAMPLES for text in (answer, answer[:50], answer[50:])),
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", BEGIN, SEP, END, ALL, ALL_END,
    "<|python_start|>", "<|tool_call_start|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_calls>",
    "<|tool_call|>", "functools", '<invoke name="', '">', '<parameter name="', "</invoke>",
    "<|action_start|><|plugin|>", KIMI_BEGIN, KIMI_SEP, KIMI_END, KIMI_ALL, KIMI_ALL_END, "functions.f:0", "｜DSML｜",
    '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "<|tool_call>call:f{", '<|"|>', "<tool_call|>", "<function_calls>", "</function_calls>", "<|channel|>", "analysis",
    "commentary to=functions.f", "<|message|>", "<|end|>", "<|call|>", "<|start|>assistant",
})  # fmt: skip


DROPS_MARKS = {"deepseek_v3", "deepseek_v31", "kimi_k2", "llama4_pythonic", "lfm2", "olmo3", CHANNELS, COMMAND}


@pytest.mark.parametrize("tool_format", FORMATS)
def test_any_chunks_of_any_text_give_the_same_parts(tool_format: str) -> None:
    @given(st.lists(st.sampled_from(PIECES), max_size=12), st.lists(st.integers(0, 300), max_size=8), st.booleans())
    def check(pieces: list[str], cuts: list[int], only_one: bool) -> None:
        text = "".join(pieces)
        bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        whole = read(tool_format, [text], only_one_call=only_one)
        assert read(tool_format, list(text), only_one_call=only_one) == whole
        assert read(tool_format, [text[a:b] for a, b in pairwise(bounds)], only_one_call=only_one) == whole
        for field, part in whole:
            assert field in ("content", "tool_call", "arguments")
            assert part
        begun = False
        for field, _ in whole:
            assert begun or field != "arguments", "a call begins with its name"
            begun = begun or field == "tool_call"
        if not begun and tool_format not in DROPS_MARKS:
            assert content_of(whole) == text, "without a call nothing is lost"

    check()


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("<tool_call></tool_call>{{ tool | tojson }}", "hermes"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "qwen3_coder"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>", "glm45"),
        ("{% set begin = '<minimax:tool_call>' %}<invoke name=", "minimax_m2"),
        ("<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>", "seed_oss"),
        ("respond with <|tool_call|> followed by a JSON list of tools used", "granite"),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "granite"),
        ("<tool_calls>[", "jamba"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("List of tools: <|tool_list_start|>[", "lfm2"),
        ("functools[", "phi4_mini_json"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        (f"{ALL}{BEGIN}function{SEP}\n```json\n", "deepseek_v3"),
        (f"{ALL}{BEGIN}{SEP}", "deepseek_v31"),
        ('Respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3_json"),
        ("[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
         "llama4_pythonic"),
        ("'<|start|>assistant<|channel|>analysis<|message|>' + message.thinking", "openai"),
        ("<|tool_calls_section_begin|>{% for call in", "kimi_k2"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2"),
        ("{% set token = '｜DSML｜' %}<{{ token }}function_calls>", "deepseek_v32"),
        ("<｜DSML｜tool_calls>", "deepseek_v4"),
        ("<｜DSML｜ calls>", "deepseek_v41"),
        ("'<|tool_call>call:' + function['name']", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("<longcat_tool_call>", "longcat"),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "cohere_command3"),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "llama4_pythonic"),
        ('[{"name": "tool_call_name", "arguments": {"arg1": "value1"}}, ...]', "list"),
        ("in <functions></functions> XML tags. <function_calls></function_calls>", "olmo3"),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_a_chat_template_reports_its_format(template: str, found: str | None) -> None:
    assert find_format(template) == found


@pytest.mark.parametrize(
    ("others", "text", "expected"),
    [
        ([], "123", "123"),
        (["null"], "123", "123"),  # a postcode, where the schema allows a string or null
        (["null"], '"quoted"', '"quoted"'),
        (["null"], "null", None),
        (["integer", "null"], "123", 123),
        (["integer"], "1.5", "1.5"),
        (["object"], '{"a": 1}', {"a": 1}),
        (["array"], "{not json", "{not json"),
    ],
)
def test_an_argument_of_several_types_is_a_string_unless_it_is_json_of_another_type(
    others: list[str], text: str, expected: Any
) -> None:
    answer = f"<tool_call>\n<function=find>\n<parameter=code>\n{text}\n</parameter>\n</function>\n</tool_call>"
    parser = build_parser(Parsing(tool_format="qwen3_coder", strings={"find": {"code": others}}))
    assert calls_of(join_parts(parser, list(answer))) == [("find", {"code": expected})]
