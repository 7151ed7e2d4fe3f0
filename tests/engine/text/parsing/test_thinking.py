"""Thinking before the answer: what is reasoning, what is the answer, for any chunks and whatever reads the rest."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_engine.text.parsing.build import Parsing, build_parser
from conveyor_engine.text.parsing.dialect import Dialect, find_dialect
from conveyor_engine.text.parsing.interface import Part

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def read(chunks: list[str], **fields: Any) -> list[Part]:
    parser = build_parser(Parsing(**{"thinking": "think", **fields}))
    parts = [part for chunk in chunks if chunk for part in parser.feed(chunk)]
    joined = list[Part]()
    for field, text in [*parts, *parser.finish()]:
        if joined and joined[-1][0] == field:
            joined[-1] = field, joined[-1][1] + text
        else:
            joined.append((field, text))
    return joined


@pytest.mark.parametrize(
    ("answer", "has_begun", "parts"),
    [
        ("<think>\na < b\n</think>\n\nYes.\n", False, [("reasoning", "a < b"), ("content", "Yes.\n")]),
        ("\n<think></think>Yes", False, [("content", "Yes")]),
        ("a</think>b</think>", True, [("reasoning", "a"), ("content", "b</think>")]),
        ("<think>a</think>b", True, [("reasoning", "a"), ("content", "b")]),
        ("</think>b", True, [("content", "b")]),
        ("a </thi", True, [("reasoning", "a </thi")]),
        (" <thin", False, [("content", " <thin")]),
        ("Yes <think>a</think>", False, [("content", "Yes <think>a</think>")]),
        ("", True, []),
        (f"<think>a</think>\n{CALL}", False, [("reasoning", "a"), ("tool_call", "f"), ("arguments", "{}")]),
        (CALL, False, [("tool_call", "f"), ("arguments", "{}")]),
        (f"<think>{CALL}</think>", False, [("reasoning", CALL)]),
    ],
)
def test_thinking_is_separated(answer: str, has_begun: bool, parts: list[Part]) -> None:
    for chunks in ([answer], list(answer)):
        assert read(chunks, has_begun_thinking=has_begun, tool_format="hermes") == parts


def test_other_families_have_other_marks() -> None:
    assert read(["[THINK]a[/THINK]b"], thinking="mistral") == [("reasoning", "a"), ("content", "b")]
    thinks = "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>"
    assert read([thinks], thinking="cohere_command3") == [("reasoning", "a"), ("content", "b")]
    call = '<|START_ACTION|>[{"tool_name": "f", "parameters": {}}]<|END_ACTION|>'
    without_tools = [("reasoning", "a"), ("content", call[16:-14])]
    assert read([f"<|START_THINKING|>a<|END_THINKING|>{call}"], thinking="cohere_command3") == without_tools
    for answer in ("<|channel>thought\na\n<channel|>b", "<|channel>thought\na<channel|>\nb"):
        assert read([answer], thinking="gemma4") == [("reasoning", "a"), ("content", "b")]
    assert read(["<seed:think>a</seed:think>b"], thinking="seed_oss") == [("reasoning", "a"), ("content", "b")]


def test_thinking_is_streamed_while_it_arrives() -> None:
    parser = build_parser(Parsing(thinking="think"))
    assert parser.feed("<think>a") == [("reasoning", "a")]
    assert parser.feed("b</th") == [("reasoning", "b")]
    assert parser.feed("ink>c") == [("content", "c")]


PIECES = [*"<>/ \na[", "think", "<think>", "</think>", "</", CALL, CALL[:12], "[THINK]", "[/THINK]"]


@given(
    st.lists(st.sampled_from(PIECES), max_size=10),
    st.lists(st.integers(0, 99), max_size=6),
    st.booleans(),
    st.sampled_from(["", "hermes", "llama3_json", "llama4_pythonic", "qwen3_coder"]),
)
def test_any_chunks_of_any_text_give_the_same_parts(
    pieces: list[str], cuts: list[int], has_begun: bool, tool_format: str
) -> None:
    text = "".join(pieces)
    fields: dict[str, Any] = {"has_begun_thinking": has_begun, "tool_format": tool_format}
    whole = read([text], **fields)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read(list(text), **fields) == read([text[a:b] for a, b in pairwise(bounds)], **fields) == whole
    if not has_begun and not text.lstrip().startswith("<think>") and not tool_format:
        assert whole == ([("content", text)] if text else [])


@pytest.mark.parametrize(
    ("template", "settings", "dialect"),
    [
        ("{{ content.split('</think>') }}", {}, "think"),
        ("[THINK][/THINK]", {}, "mistral"),
        ("{{ messages }}", {}, None),
        ("{{ messages }}", {"reasoning": "seed_oss"}, "seed_oss"),
        ("</think>", {"reasoning": "none"}, None),
    ],
)
def test_a_chat_template_reports_its_marks(template: str, settings: Any, dialect: str | None) -> None:
    assert find_dialect(template, **settings).thinking == dialect


def test_a_setting_wins_over_the_template() -> None:
    assert find_dialect("<tool_call></think>") == Dialect("hermes", find_dialect("").why_no_tools, "think")
    assert find_dialect("<tool_call>", "mistral").tool_format == "mistral"
    assert find_dialect("<tool_call>", "none").tool_format is None
