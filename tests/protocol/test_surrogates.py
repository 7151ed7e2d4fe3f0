"""Lone surrogates are replaced, and nothing else changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_protocol.surrogates import replace_lone_surrogates


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (rb'"\ud83d"', "\ufffd"),
        (rb'"\uD83D..."', "\ufffd..."),
        (rb'"\ude00"', "\ufffd"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd\U0001f600"),
        (rb'"\ude00\ud83d"', "\ufffd\ufffd"),
        (rb'"\ud83d\\ude00"', "\ufffd\\ude00"),
        (rb'"\\ud83d"', "\\ud83d"),
        (rb'"\\\ud83d"', "\\\ufffd"),
        (rb'"\ud83d\ude00 \ud7ff \ue000"', "\U0001f600 \ud7ff \ue000"),
    ],
)
def test_a_lone_surrogate_becomes_the_replacement_character(body: bytes, expected: str) -> None:
    assert json.loads(replace_lone_surrogates(body)) == expected


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_without_lone_surrogates_stays_as_it_is(value: object) -> None:
    for body in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
        assert replace_lone_surrogates(body) == body


def test_no_body_takes_long() -> None:
    """The number of replacements is bounded, and each backslash is looked at once."""
    body = rb'"%s"' % (rb"\ud83d" * 20_000)
    assert json.loads(replace_lone_surrogates(body)) == "\ufffd" * 10_000 + "\ud83d" * 10_000
    assert replace_lone_surrogates(rb"\\" * 10**6 + rb"\ud83d") == rb"\\" * 10**6 + rb"\ufffd"
