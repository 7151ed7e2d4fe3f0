"""Tests how the number of requests in flight follows what the service says."""

from hypothesis import given
from hypothesis import strategies as st

from conveyor_jobs.concurrency import Concurrency


def test_it_doubles_each_round_until_the_first_refusal() -> None:
    concurrency = Concurrency(1000)
    assert concurrency.limit == 4
    for expected in (8, 16, 32):
        for _ in range(concurrency.limit):
            concurrency.note_answer()
        assert concurrency.limit == expected


def test_after_a_refusal_it_halves_and_then_grows_by_one_each_round() -> None:
    concurrency = Concurrency(1000)
    for _ in range(28):
        concurrency.note_answer()
    concurrency.note_refusal(sent_at=1.0, now=2.0)
    assert concurrency.limit == 16
    for _ in range(17):
        concurrency.note_answer()
    assert concurrency.limit == 17


def test_refusals_of_one_round_count_once() -> None:
    concurrency = Concurrency(64)
    for _ in range(60):
        concurrency.note_answer()
    for _ in range(20):
        concurrency.note_refusal(sent_at=1.0, now=2.0)
    assert concurrency.limit == 32
    concurrency.note_refusal(sent_at=2.5, now=3.0)
    assert concurrency.limit == 16


@given(st.lists(st.booleans(), max_size=500), st.integers(1, 4096))
def test_it_stays_between_one_and_the_most(events: list[bool], most: int) -> None:
    concurrency = Concurrency(most)
    for number, is_answer in enumerate(events):
        if is_answer:
            concurrency.note_answer()
        else:
            concurrency.note_refusal(number, number + 0.5)
        assert 1 <= concurrency.limit <= most
