"""The channels of gpt-oss: what is reasoning, what is the answer and what is a call, for any chunks."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.text.parsing.examples import join_parts

from conveyor_engine.text.parsing.build import Parsing, build_parser
from conveyor_engine.text.parsing.dialect import Dialect, find_dialect
from conveyor_engine.text.parsing.formats import CHANNELS
from conveyor_engine.text.parsing.interface import Part
from conveyor_engine.text.parsing.thinking import GPT_OSS

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def read(chunks: list[str], **fields: Any) -> list[Part]:
    parser = build_parser(Parsing(**{"thinking": GPT_OSS, "tool_format": CHANNELS, **fields}))
    return join_parts(parser, chunks)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (f"{ANALYSIS}hm{NEXT}{FINAL}Yes.<|return|>", [("reasoning", "hm"), ("content", "Yes.")]),
        (f"{FINAL} Yes.\n", [("content", " Yes.\n")]),
        (f"{ANALYSIS}in the middle of", [("reasoning", "in the middle of")]),
        (f"{ANALYSIS}hm{NEXT}{CALL}", [("reasoning", "hm"), ("tool_call", "f"), ("arguments", '{"a": 1}')]),
        (
            f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Yes.{NEXT}{CALL}<|call|>",
            [("content", "I look.\nYes."), ("tool_call", "f"), ("arguments", '{"a": 1}')],
        ),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b", [("reasoning", "a\nb")]),
        (f"{ANALYSIS}a<|start|>assistant{FINAL}b", [("reasoning", "a"), ("content", "b")]),  # without an end
        (f"<|channel|>analysis to=functions.f<|message|>{{}}{NEXT}{FINAL}b", [
            ("tool_call", "f"), ("arguments", "{}"), ("content", "b"),
        ]),
        ("<|channel|>commentary to=math.sum<|message|>{}", [("tool_call", "math.sum"), ("arguments", "{}")]),
        ("<|channel|>commentary to=functions.f <|constrain|>text<|message|>foo", [
            ("tool_call", "f"), ("arguments", "foo"),
        ]),
        # the answer of a real model lacks `<|call|>`, which is a stop token
        (CALL.removesuffix('{"a": 1}'), [("tool_call", "f"), ("arguments", "{}")]),
        (f"<|channel|>commentary to=assistant<|message|>a{NEXT}{FINAL}b", [("reasoning", "a"), ("content", "b")]),
        ("Yes.", [("content", "Yes.")]),
        ("to=", [("content", "to=")]),
        ("", []),
    ],
)  # fmt: skip
def test_channels_are_separated(answer: str, parts: list[Part]) -> None:
    for chunks in ([answer], list(answer)):
        assert read(chunks) == parts


def test_without_tools_a_call_is_reasoning() -> None:
    assert read([CALL], tool_format="") == [("reasoning", '{"a": 1}')]


def test_thinking_that_is_not_separated_is_content() -> None:
    parts = [("content", "hm\nYes."), ("tool_call", "f"), ("arguments", '{"a": 1}')]
    assert read([f"{ANALYSIS}hm{NEXT}{FINAL}Yes.{NEXT}{CALL}"], thinking="") == parts


def test_a_list_that_a_grammar_forces_has_no_channels() -> None:
    parts = [("tool_call", "f"), ("arguments", "{}")]
    assert read(['[{"name": "f", "arguments": {}}]'], tool_format="list") == parts


PIECES = [
    *"<>|= \na{}",
    ANALYSIS,
    FINAL,
    NEXT,
    CALL,
    "to=",
    "<|message|>",
    "<|call|>",
    "<|chan",
    "<|start|>",
    "<|end|>",
]


@given(
    st.lists(st.sampled_from(PIECES), max_size=10),
    st.lists(st.integers(0, 99), max_size=6),
    st.sampled_from([GPT_OSS, ""]),
)
def test_any_chunks_of_any_text_give_the_same_parts(pieces: list[str], cuts: list[int], thinking: str) -> None:
    text = "".join(pieces)
    whole = read([text], thinking=thinking)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read(list(text), thinking=thinking) == whole
    assert read([text[a:b] for a, b in pairwise(bounds)], thinking=thinking) == whole


def test_a_template_with_channels_decides_both() -> None:
    template = "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    assert find_dialect(template) == Dialect(CHANNELS, find_dialect(template).why_no_tools, GPT_OSS)
