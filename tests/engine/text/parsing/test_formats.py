"""Calls of tools as each family of models writes them: what is read, for any chunks, and what of it is text."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_engine.text.parsing.build import Parsing, build_parser
from conveyor_engine.text.parsing.formats import FORMATS, find_foreign_format, find_format
from conveyor_engine.text.parsing.interface import Part

WEATHER = '{"city": "São \\"Paulo\\"", "days": [1, {"a": "}]"}]}'
CALL = ("get_weather", json.loads(WEATHER))
TIME = ("get_time", {})
STRINGS = {"get_weather": ["city"], "write": ["text"]}
BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

# format, answer, content, calls
Example = tuple[str, str, str, list[tuple[str, Any]]]
EXAMPLES: list[Example] = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>', "", [CALL]),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        [CALL, TIME],
    ),
    ("hermes", f'<tool_call>{{"arguments": {WEATHER}, "name": "get_weather"}}</tool_call>', "", [CALL]),
    ("hermes", '<tool_call>{"id": 1, "name": "get_time", "arguments": {}, "x": [2]}</tool_call>Hi', "Hi", [TIME]),
    ("hermes", "a < b, <tool> and\n\n <tool_call", "a < b, <tool> and\n\n <tool_call", []),
    ("hermes", "<tool_call>none</tool_call> ", "<tool_call>none</tool_call> ", []),
    ("hermes", '<tool_call>\n{"name": "f"}\n</tool_call>', '<tool_call>\n{"name": "f"}\n</tool_call>', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', '<tool_call>{"name": 5, "arguments": {}}', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}', '<tool_call>{"name": "f", "arguments": "{}"}', []),
    ("hermes", '<tool_call>{"name": "get_ti', '<tool_call>{"name": "get_ti', []),
    ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}', '<tool_call>{"name": "\\x", "arguments": {}}', []),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    ("llama3_json", f'<|python_tag|>{{"name": "get_weather", "parameters": {WEATHER}}}', "", [CALL]),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {WEATHER}}}; {{"name": "get_time", "parameters": {{}}}}',
        "",
        [CALL, TIME],
    ),
    ("llama3_json", ' {"type": "function", "name": "get_time", "parameters": {}}', "", [TIME]),
    ("llama3_json", '{"name": "Bob", "age": 5} is he', '{"name": "Bob", "age": 5} is he', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("llama3_json", "<|py{}", "<|py{}", []),
    ("llama3_json", "Hello {", "Hello {", []),
    ("list", f'[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "parameters": {{}}}}]', "",
     [CALL, TIME]),
    ("list", "[1, 2]", "[1, 2]", []),
    ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]',
        "",
        [CALL, TIME],
    ),
    ("mistral", f"Yes.[TOOL_CALLS]get_weather[ARGS]{WEATHER}[TOOL_CALLS]get_time[ARGS]{{}}", "Yes.", [CALL, TIME]),
    ("mistral", f"Yes.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{WEATHER}", "Yes.", [CALL]),
    ("mistral", "Yes.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e", "Yes.[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e", []),
    ("mistral", f"[TOOL_CALLS]get_weather{WEATHER}", "", [CALL]),
    ("mistral", "[TOOL_CALLS]none", "[TOOL_CALLS]none", []),
    ("mistral", "[TOOL_CALLS][1]", "[TOOL_CALLS][1]", []),
    (
        "deepseek_v3",
        f"{ALL}{BEGIN}function{SEP}get_weather\n```json\n{WEATHER}\n```{END}\n{BEGIN}function{SEP}get_time\n"
        f"```json\n{{}}\n```{END}{ALL_END}",
        "",
        [CALL, TIME],
    ),
    (
        "deepseek_v31",
        f"I look.{ALL}{BEGIN}get_weather{SEP}{WEATHER}{END}{BEGIN}get_time{SEP}{{}}{END}{ALL_END}",
        "I look.",
        [CALL, TIME],
    ),
    (
        "qwen3_coder",
        'Well:\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSão "Paulo"\n</parameter>\n<parameter=days>\n'
        '[1, {"a": "}]"}]\n</parameter>\n</function>\n</tool_call>',
        "Well:",
        [CALL],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=text>\n12\n\n  x</y>\n\n</parameter>\n<parameter=times>\nTrue\n"
        "</parameter>\n<parameter=how>\nlike this\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=get_time>\n</function>\n</tool_call>",
        "",
        [("write", {"text": "12\n\n  x</y>\n", "times": True, "how": "like this"}), TIME],
    ),
    ("qwen3_coder", "<function=get_time></function>", "", [TIME]),
    ("qwen3_coder", "<tool_call>\n{}</tool_call>", "<tool_call>\n{}</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<funk", "<tool_call>\n<funk", []),
    (
        "glm45",
        'Well:\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São "Paulo"</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>[1, {"a": "}]"}]</arg_value>\n</tool_call>\n'
        "<tool_call>get_time\n</tool_call>",
        "Well:",
        [CALL, TIME],
    ),
    (
        "glm45",
        "<tool_call>write<arg_key>text</arg_key><arg_value>12</arg_value><arg_key>n</arg_key><arg_value>5</arg_value>"
        "</tool_call>",
        "",
        [("write", {"text": "12", "n": 5})],
    ),
    ("glm45", "<tool_call>", "<tool_call>", []),
    ("glm45", "<tool_call>get_ti", "<tool_call>get_ti", []),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">São "Paulo"</parameter>\n'
        '<parameter name="days">[1, {"a": "}]"}]</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>",
        "I look.",
        [CALL, TIME],
    ),
    ("minimax_m2", "<minimax:tool_call>\nnone", "<minimax:tool_call>\nnone", []),
    (
        "seed_oss",
        '<seed:tool_call>\n<function=get_weather>\n<parameter=city>São "Paulo"</parameter>\n'
        '<parameter=days>[1, {"a": "}]"}]</parameter>\n</function>\n</seed:tool_call>',
        "",
        [CALL],
    ),
    ("granite", f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "get_time", "arguments": {{}}}}]'
        "<|/tool_call|>",
        "",
        [CALL, TIME],
    ),
    (
        "jamba",
        f'Yes.<tool_calls>[\n{{"name": "get_weather", "arguments": {WEATHER}}},\n'
        '{"name": "get_time", "arguments": {}}\n]</tool_calls>',
        "Yes.",
        [CALL, TIME],
    ),
    (
        "internlm",
        f'I look.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {WEATHER}}}<|action_end|>\n',
        "I look.",
        [CALL],
    ),
    ("phi4_mini_json", f'functools[{{"name": "get_weather", "arguments": {WEATHER}}}]', "", [CALL]),
    ("phi4_mini_json", "import functools", "import functools", []),
    ("phi4_mini_json", "functools[0] and functools.cache", "functools[0] and functools.cache", []),
    (
        "lfm2",
        "<|tool_call_start|>[get_weather(city='São \"Paulo\"', days=[1, {'a': \"}]\"}]), get_time()]"
        "<|tool_call_end|>Wait",
        "Wait",
        [CALL, TIME],
    ),
    (
        "llama4_pythonic",
        "<|python_start|>[get_weather(city='São \"Paulo\"', days=[1, {'a': \"}]\"}]), get_time()]<|python_end|>",
        "",
        [CALL, TIME],
    ),
    (
        "llama4_pythonic",
        '[f(a=-1.5e3, b=None, c={"x": [True, False]}, d="it\\\'s \\n\\u00e9\\x41", e=[])]',
        "",
        [("f", {"a": -1500.0, "b": None, "c": {"x": [True, False]}, "d": "it's \néA", "e": []})],
    ),
    (
        "llama4_pythonic",
        r"""[f(a='\xzz', b='\x4', c='\u00e', d='\u', e='\q\x4\n')]""",
        "",
        [("f", {"a": r"\xzz", "b": r"\x4", "c": r"\u00e", "d": r"\u", "e": "\\q\\x4\n"})],
    ),
    ("llama4_pythonic", "[link](http://a)", "[link](http://a)", []),
    ("llama4_pythonic", "[1, 2] and", "[1, 2] and", []),
    ("llama4_pythonic", "[see(this)]", "[see(this)]", []),
]  # fmt: skip


def read(tool_format: str, chunks: list[str], **fields: Any) -> list[Part]:
    """The parts, those of a field joined as a client joins them."""
    parser = build_parser(Parsing(tool_format=tool_format, strings=STRINGS, **fields))
    parts = [part for chunk in chunks if chunk for part in parser.feed(chunk)]
    joined = list[Part]()
    for field, text in [*parts, *parser.finish()]:
        if joined and joined[-1][0] == field != "tool_call":
            joined[-1] = field, joined[-1][1] + text
        else:
            joined.append((field, text))
    return joined


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
    "<|action_start|><|plugin|>",
})  # fmt: skip


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
        if not begun and tool_format not in (
            "deepseek_v3",
            "deepseek_v31",
            "llama4_pythonic",
            "lfm2",
        ):
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
        ("<|channel|>commentary to=functions", None),
        ("{{ messages }}", None),
    ],
)  # fmt: skip
def test_a_chat_template_reports_its_format(template: str, found: str | None) -> None:
    assert find_format(template) == found


def test_a_format_that_is_known_and_not_read_is_named() -> None:
    assert (find_foreign_format("<|channel|>analysis") or "").startswith("harmony")
    assert find_foreign_format("<tool_call>") is None
