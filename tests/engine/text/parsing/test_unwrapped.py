"""Tests that a custom tool's call gets its text, for any division of the arguments into chunks."""

import json
from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from conveyor_engine.text.parsing.build import Parsing, build_parser
from conveyor_engine.text.parsing.interface import Part

PARSING = Parsing(tool_format="hermes", texts=["patch"])


def read(text: str, cuts: Sequence[int] = (), parsing: Parsing = PARSING) -> list[Part]:
    """Return the parts of an answer that arrives in pieces, with neighbours of one field joined."""
    parser = build_parser(parsing)
    places = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    parts = [part for begin, end in pairwise(places) for part in parser.feed(text[begin:end])]
    joined: list[Part] = []
    for field, piece in [*parts, *parser.finish()]:
        if joined and joined[-1][0] == field != "tool_call":
            joined[-1] = (field, joined[-1][1] + piece)
        else:
            joined.append((field, piece))
    return joined


def call(arguments: str, name: str = "patch") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@given(st.text(), st.booleans(), st.lists(st.integers(1, 400)))
def test_a_text_is_read_however_it_is_escaped_and_cut(text: str, ascii_only: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read(call(arguments), cuts) == [("tool_call", "patch"), *([("arguments", text)] if text else [])]


@pytest.mark.parametrize("arguments", ['{"patch": "a"}', '{"input": 5}', "{}"])
def test_arguments_of_another_form_are_the_text(arguments: str) -> None:
    assert read(call(arguments)) == [("tool_call", "patch"), ("arguments", arguments)]


@given(st.text(min_size=1), st.lists(st.integers(1, 400)))
def test_an_answer_that_is_an_input_is_kept_to_the_letter(text: str, cuts: list[int]) -> None:
    parsing = Parsing(tool_format="hermes", input_of="patch")
    assert read(text, cuts, parsing) == [("tool_call", "patch"), ("arguments", text)]


def test_an_input_begins_after_the_thinking() -> None:
    parsing = Parsing(tool_format="hermes", thinking="think", has_begun_thinking=True, input_of="patch")
    assert read("hm</think>1 + 2", (), parsing) == [
        ("reasoning", "hm"), ("tool_call", "patch"), ("arguments", "1 + 2"),
    ]  # fmt: skip
    assert read("hm", (), parsing) == [("reasoning", "hm")], "the answer was cut before the call"


def test_a_text_that_is_cut_is_reported_as_far_as_it_is_complete() -> None:
    whole = call('{"input": "a\\nb"}')
    assert read(whole[: whole.index("b")]) == [("tool_call", "patch"), ("arguments", "a\n")]


def test_functions_keep_their_arguments() -> None:
    two = call('{"input": "a"}') + call('{"input": "a"}', "other")
    assert read(two) == [
        ("tool_call", "patch"), ("arguments", "a"), ("tool_call", "other"), ("arguments", '{"input": "a"}'),
    ]  # fmt: skip
