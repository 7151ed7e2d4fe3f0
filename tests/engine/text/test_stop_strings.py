import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_engine.text.stop_strings import StopMatcher, StopStrings


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The slow way: the first end, and there the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(map(len, found))
    return None


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_it_finds_what_the_slow_way_finds(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    found = matcher.feed(text)
    assert found == first_stop(text, stops)
    assert matcher.found == ("" if found is None else text[found[0] - found[1] : found[0]])


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_it_holds_the_longest_end_that_begins_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    if matcher.feed(text) is None:
        ends = [text[i:] for i in range(len(text) + 1)]
        assert matcher.num_held == max(len(end) for end in ends if not end or any(s.startswith(end) for s in stops))


def test_choices_share_what_was_computed_for_their_stop_strings() -> None:
    stops = StopStrings(["abab"])
    assert [StopMatcher(stops).feed("aabaabab") for _ in range(2)] == [(8, 4), (8, 4)]


@pytest.mark.parametrize(
    "stops",
    [
        ["a" * 1023 + "b"],
        [chr(ord("c") + i) + "a" * 1022 + "b" for i in range(15)] + ["a" * 1023 + "b"],
        ["a" * 511 + "c" + "a" * 511 + chr(ord("A") + i) for i in range(16)],
        ["a" * (1024 - 2**i % 1000) + "b" for i in range(16)],
    ],
    ids=["one", "other beginnings", "common beginnings", "many lengths"],
)
@pytest.mark.parametrize("text", ["a" * 5000, ("a" * 1022 + "x") * 5, ("a" * 511 + "ca") * 10], ids=["a", "near", "c"])
def test_a_character_costs_a_few_lines_for_each_stop_string(stops: list[str], text: str) -> None:
    """Before, it cost up to 16 x 1,024 comparisons: 5 ms per token and choice, on the loop of all streams."""
    matcher, lines = StopMatcher(StopStrings(stops)), 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for character in text:
            assert matcher.feed(character) is None
            assert matcher.num_held < 1024
    finally:
        sys.settrace(before)
    assert lines / len(text) < 25 * len(stops) + 25
