"""Tests how the number of requests in flight follows what the service says."""

from hypothesis import given
from hypothesis import strategies as st

from conveyor_jobs.concurrency import Concurrency, choose_pause


def answer_rounds(concurrency: Concurrency, times: int) -> list[int]:
    """Answer as many requests as are in flight, this many times. Returns the limit after each round."""
    limits = []
    for _ in range(times):
        for _ in range(concurrency.limit):
            concurrency.note_answer()
        limits.append(concurrency.limit)
    return limits


def test_it_doubles_each_round_until_the_first_refusal() -> None:
    concurrency = Concurrency(1000)
    assert concurrency.limit == 4
    assert answer_rounds(concurrency, 4) == [8, 16, 32, 64]


def test_after_a_refusal_it_halves_and_grows_slowly_until_it_is_well_above_that() -> None:
    concurrency = Concurrency(1000)
    answer_rounds(concurrency, 2)
    concurrency.note_full(1.0, 2.0, 0)
    assert concurrency.limit == 8
    limits = answer_rounds(concurrency, 14)
    assert limits[:4] == [8, 9, 10, 11]
    assert limits[-1] > 32, "the service has more room now than at the refusal"


def test_refusals_of_one_round_count_once() -> None:
    concurrency = Concurrency(64)
    answer_rounds(concurrency, 4)
    for _ in range(20):
        concurrency.note_full(1.0, 2.0, 0)
    assert concurrency.limit == 32
    concurrency.note_full(2.5, 3.0, 0)
    assert concurrency.limit == 16


def test_an_absent_service_gets_few_requests_and_many_as_soon_as_it_answers() -> None:
    concurrency = Concurrency(64)
    for at in range(10):
        concurrency.note_absent(at, at + 0.5, 0)
    assert concurrency.limit == 4
    assert answer_rounds(concurrency, 4) == [8, 16, 32, 64]


def test_nothing_is_sent_after_a_refusal_until_a_pause_is_over_or_a_response_arrives() -> None:
    concurrency = Concurrency(64)
    concurrency.note_full(0.0, 1.0, 7)
    assert 8.0 <= concurrency.open_at <= 1.0 + 7 * 1.25
    concurrency.note_answer()
    assert concurrency.open_at < 1.0
    pauses = []
    for at in range(100, 110):
        concurrency.note_absent(at, at + 0.5, 0)
        pauses.append(concurrency.open_at - at - 0.5)
    assert pauses[0] < 2
    assert pauses[-1] >= 60


@given(st.integers(1, 10_000), st.floats(0, 1e9))
def test_a_pause_is_no_shorter_than_requested_up_to_a_minute(times: int, retry_after: float) -> None:
    assert min(60, retry_after or 1.0) <= choose_pause(times, retry_after) <= 75


@given(st.lists(st.sampled_from(["answer", "full", "absent"]), max_size=500), st.integers(1, 4096))
def test_it_stays_between_one_and_the_most(events: list[str], most: int) -> None:
    concurrency = Concurrency(most)
    for number, event in enumerate(events):
        if event == "answer":
            concurrency.note_answer()
        elif event == "full":
            concurrency.note_full(number, number + 0.5, 0)
        else:
            concurrency.note_absent(number, number + 0.5, 0)
        assert 1 <= concurrency.limit <= most
