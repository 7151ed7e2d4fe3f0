"""Tests tokens of content that the parser reports after its tokens arrive, and between other text."""

import pytest

from conveyor_engine.tasks.generate.serving.content_tokens import ContentTokens, Token
from conveyor_engine.text.parsing.interface import Field, Part
from conveyor_engine.wire.request import TokenLogprobs

THOUGHT, TEXT, CALL = "<think>it is so</think>", "so it is.", "<tool_call>f</tool_call>"


def read_all(size: int, late: int) -> str:
    """Return the characters whose tokens were reported.

    Tokens have `size` characters; parts arrive `late` pieces later.
    """
    text = THOUGHT + TEXT + CALL
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    begin, tokens = len(THOUGHT), ContentTokens()
    spans: list[tuple[Field, int, int]] = [("reasoning", 7, begin - 8), ("content", begin, begin + len(TEXT))]
    found: list[Token] = []
    for number, piece in enumerate([*pieces, *[""] * late]):
        token = [Token(TokenLogprobs(number, -1.0, b"", b""), number * size)] if piece else []
        shown, until = max(0, (number - late) * size), max(0, (number - late + 1) * size)
        parts = [(name, text[max(first, shown) : min(last, until)]) for name, first, last in spans]
        parts = [(name, part) for name, part in parts if part]
        found += tokens.take(parts, token, piece)
    assert len({token.start for token in found}) == len(found), "each token once"
    assert all(begin - size < token.start < begin + len(TEXT) for token in found)
    return "".join(text[token.start : token.start + size] for token in found)


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_tokens_of_content_are_those_of_its_place(size: int, late: int) -> None:
    tokens = read_all(size, late)
    assert TEXT in tokens
    assert len(tokens) <= len(TEXT) + 2 * (size - 1), "only the tokens at both ends have other text too"


def test_content_that_is_nowhere_has_no_tokens() -> None:
    tokens = ContentTokens()
    assert tokens.take([("content", "x")], [Token(TokenLogprobs(1, -1.0, b"", b""), 0)], "abc") == []


@pytest.mark.parametrize(
    ("text", "parts", "start"),
    [
        ('<t>4</t>4<c>{"n": 4}</c>', [("reasoning", "4"), ("content", "4"), ("arguments", '{"n": 4}')], 8),
        ('<c>{"n": 4}</c>4', [("arguments", '{"n": 4}'), ("content", "4")], 15),
        ("<c><n>4</n></c>4", [("arguments", '{"n": 4}'), ("content", "4")], 15),
    ],
)
def test_content_whose_text_also_stands_elsewhere_has_its_own_tokens(text: str, parts: list[Part], start: int) -> None:
    each = [Token(TokenLogprobs(number, -1.0, b"", b""), number) for number in range(len(text))]
    assert [token.start for token in ContentTokens().take(parts, each, text)] == [start]
