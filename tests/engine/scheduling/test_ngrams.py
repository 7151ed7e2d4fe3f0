"""Tests guesses by n-grams, against a search of the whole text."""

from array import array
from random import Random

import pytest

from conveyor_engine.scheduling import ngrams
from conveyor_engine.scheduling.ngrams import LENGTH, NGrams


def ignore(num_right: int, is_right: bool) -> None:
    pass


def find_newest(text: list[int]) -> int:
    """Return the place after the newest earlier occurrence of the last tokens; 0: none."""
    for place in range(len(text) - 1, LENGTH - 1, -1):
        if text[place - LENGTH : place] == text[-LENGTH:]:
            return place
    return 0


def test_a_fresh_guess_is_what_followed_the_newest_occurrence_of_the_last_tokens() -> None:
    random = Random(0)
    text = [random.randrange(4) for _ in range(400)]
    num_found = num_there = 0
    for end in range(len(text)):
        found = NGrams(len(text))
        found.follow(array("I", text[:end]), end, end, ignore)
        if found.num_right == 0:
            newest = find_newest(text[:end])
            assert found.place in (newest, 0), "another n-gram with the same hash may be in its place"
            num_found += found.place > 0
            num_there += newest > 0
    assert num_found > 0.8 * num_there > 50


def test_a_guess_follows_its_place_while_it_is_right_and_each_token_of_the_answer_is_judged() -> None:
    prompt, answer = [1, 2, 3, 4, 5, 6, 7, 9, 9], [1, 2, 3, 4, 5, 8]
    judged: list[tuple[int, bool]] = []
    found = NGrams(100)
    text = array("I", prompt)
    for token in answer:
        text.append(token)
        found.follow(text, len(text), len(prompt), lambda *each: judged.append(each))
        if token == 3:
            assert found.draft(text, 4) == [4, 5, 6, 7]
    assert judged == [(0, True), (1, True), (2, False)]
    assert found.draft(text, 4) == []


def test_a_draft_of_a_text_that_repeats_itself_goes_on_beyond_its_end() -> None:
    text = array("I", [9, 5, 6, 7, 5, 6, 7])
    found = NGrams(20)
    found.follow(text, len(text), 0, ignore)
    assert found.draft(text, 8) == [5, 6, 7, 5, 6, 7, 5, 6]


def test_tokens_are_read_in_parts_and_once() -> None:
    text = array("I", [Random(1).randrange(3) for _ in range(100)])
    whole, parts = NGrams(100), NGrams(100)
    whole.follow(text, 100, 0, ignore)
    for end in range(0, 101, 7):
        parts.follow(text, end, 0, ignore)
    parts.follow(text, 100, 0, ignore)
    assert (parts.place, parts.num_right, parts.num_seen) == (whole.place, whole.num_right, 100)


@pytest.mark.parametrize("bits", [1, 4])
def test_a_table_that_is_too_small_gives_fewer_guesses_and_no_wrong_ones(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    monkeypatch.setattr(ngrams, "_TABLE_BITS", bits)
    random = Random(2)
    text = [random.randrange(5) for _ in range(300)]
    num_found = 0
    for end in range(3, len(text)):
        found = NGrams(300)
        found.follow(array("I", text[:end]), end, end, ignore)
        if found.place and found.num_right == 0:
            assert text[found.place - LENGTH : found.place] == text[end - LENGTH : end]
            num_found += 1
    assert num_found


def test_a_request_takes_at_most_256_kib() -> None:
    found = NGrams(10**7)
    assert not found._places, "nothing is read"
    found.follow(array("I", [1]), 1, 1, ignore)
    assert len(found._places) * found._places.itemsize == 256 * 1024
