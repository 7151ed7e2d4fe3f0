"""What becomes of text that others wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_api.text import clip, make_printable

ANY_TEXT = st.text(st.characters(codec=None, categories=None))  # lone surrogates too


@given(ANY_TEXT, st.integers(4, 100))
def test_whatever_is_clipped_can_be_printed_and_fits(text: str, max_bytes: int) -> None:
    clipped = clip(text, max_bytes)
    assert clipped.isprintable()
    assert len(clipped.encode()) <= max_bytes


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_what_can_be_printed_stays_as_it_is(text: str) -> None:
    assert make_printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand \u00a0more\u2028", "two lines and  more "),
        ("\x1b]0;owned\x07", "\ufffd]0;owned\ufffd"),  # a terminal's title
        ("\x9b31m", "\ufffd31m"),  # an escape of one character
        ("cod.\u202efdp", "cod.\ufffdfdp"),  # what follows is shown backwards
        ("pass\u200bword \u2066", "pass\ufffdword \ufffd"),
        ("\ud800 \udfff", "\ufffd \ufffd"),
        ("na\u00efve \u6a21\u578b \U0001f600", "na\u00efve \u6a21\u578b \U0001f600"),
    ],
)
def test_terminals_and_pages_get_nothing_that_they_obey(text: str, shown: str) -> None:
    assert make_printable(text) == shown
