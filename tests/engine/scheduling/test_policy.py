"""When each mode lets a batch start, and whom it takes."""

from typing import get_args

import pytest
from tests.engine.builders import make_state

from conveyor_engine.config.engine_config import BatchingMode, EngineConfig
from conveyor_engine.scheduling.policy import (
    DYNAMIC_WINDOW_SECONDS,
    STATIC_WINDOW_SECONDS,
    Continuous,
    Dynamic,
    NoBatching,
    Policy,
    Static,
    build_policy,
)
from conveyor_engine.scheduling.request_state import RequestState


def named(
    policy: Policy, waiting: list[RequestState], now: float, *, draining: bool = False
) -> tuple[list[int], str | None]:
    """Indices of the candidates in `waiting`, and the reason."""
    requests, reason = policy.candidates(waiting, now, draining)
    return [waiting.index(request) for request in requests], reason


def test_none_takes_the_oldest_alone() -> None:
    waiting = [make_state(), make_state()]
    assert named(NoBatching(), waiting, 0.0) == ([0], "full")
    assert named(NoBatching(), [], 0.0) == ([], None)


def test_continuous_takes_everybody_at_once_and_never_closes() -> None:
    assert named(Continuous(), [make_state(), make_state()], 0.0) == ([0, 1], None)


def test_static_starts_when_full() -> None:
    policy = Static(2, 5.0, pads=True)
    assert named(policy, [make_state(arrival_time=1.0)], 1.0) == ([], None)
    waiting = [make_state(arrival_time=1.0), make_state(arrival_time=2.0)]
    assert named(policy, waiting, 2.0) == ([0, 1], "full")
    assert policy.due_at(waiting) <= 2.0


def test_static_starts_when_its_first_request_has_waited_long_enough() -> None:
    policy = Static(3, 5.0, pads=True)
    waiting = [make_state(arrival_time=1.0), make_state(arrival_time=4.0)]
    assert policy.due_at(waiting) == 6.0
    assert named(policy, waiting, 5.9) == ([], None)
    assert named(policy, waiting, 6.0) == ([0, 1], "window")


@pytest.mark.parametrize("policy", [Static(3, 5.0, pads=True), Dynamic(3, 5.0)])
def test_a_drain_does_not_wait_for_the_window(policy: Policy) -> None:
    assert named(policy, [make_state(arrival_time=1.0)], 1.0, draining=True) == ([0], "drain")


def test_the_dynamic_window_runs_from_the_first_request_not_from_the_last() -> None:
    policy = Dynamic(3, 1.0)
    waiting = [make_state(arrival_time=1.0), make_state(arrival_time=1.9)]
    assert policy.due_at(waiting) == 2.0
    assert named(policy, waiting, 1.99) == ([], None)
    assert named(policy, waiting, 2.0) == ([0, 1], "window")


def test_dynamic_groups_by_length() -> None:
    policy = Dynamic(2, 1.0)
    short, long, short_too = make_state(5, max_tokens=5), make_state(50, max_tokens=5), make_state(6, max_tokens=5)
    assert named(policy, [short, long, short_too], 0.0) == ([0, 2], "full")


def test_a_full_dynamic_group_starts_before_an_older_one_that_still_waits() -> None:
    policy = Dynamic(2, 10.0)
    waiting = [make_state(50, arrival_time=1.0), make_state(5, arrival_time=2.0), make_state(5, arrival_time=3.0)]
    assert named(policy, waiting, 3.0) == ([1, 2], "full")
    assert named(policy, waiting, 11.0) == ([0], "window"), "once due, the oldest goes first: nobody starves"


def test_the_size_of_a_step_closes_no_dynamic_batch() -> None:
    waiting = [make_state(128, max_tokens=16) for _ in range(32)]
    policy = build_policy(EngineConfig(model="m", batching_mode="dynamic", max_num_seqs=32))
    assert named(policy, waiting, 0.0) == (list(range(32)), "full")
    assert named(policy, waiting[:31], 1.0) == (list(range(31)), "window")
    asked = build_policy(EngineConfig(model="m", batching_mode="dynamic", max_num_seqs=32, max_num_batched_tokens=1024))
    assert named(asked, waiting, 0.0) == (list(range(8)), "tokens")


def test_dynamic_groups_by_the_length_to_be_expected_not_by_the_longest_possible() -> None:
    short, long = make_state(5, max_tokens=5000), make_state(500, max_tokens=4500)
    assert named(Dynamic(2, 1.0), [short, long], 1.0)[0] == [0, 1]
    short.expected_total_tokens, long.expected_total_tokens = 105, 600
    assert named(Dynamic(2, 1.0), [short, long], 1.0)[0] == [0]


def test_dynamic_closes_a_batch_that_reaches_its_own_token_limit() -> None:
    policy = Dynamic(8, 10.0, 100)
    waiting = [make_state(40), make_state(45), make_state(42)]
    assert named(policy, waiting, 0.0) == ([0, 1], "tokens")
    assert policy.due_at(waiting) == 0.0


def test_a_prompt_larger_than_the_budget_is_taken_alone() -> None:
    assert named(Dynamic(8, 1.0, 10), [make_state(40)], 5.0) == ([0], "window")


@pytest.mark.parametrize(("mode", "window"), [("static", STATIC_WINDOW_SECONDS), ("dynamic", DYNAMIC_WINDOW_SECONDS)])
def test_the_window_defaults_by_mode_and_may_be_set(mode: str, window: float) -> None:
    waiting = [make_state(arrival_time=7.0)]
    default = EngineConfig(model="m", batching_mode=mode)  # type: ignore[arg-type]
    assert build_policy(default).due_at(waiting) == 7.0 + window
    given = EngineConfig(model="m", batching_mode=mode, batching_window_seconds=0.5)  # type: ignore[arg-type]
    assert build_policy(given).due_at(waiting) == 7.5


def test_the_modes_differ_in_who_joins_who_keeps_together_and_what_is_padded() -> None:
    configs = [
        *(EngineConfig(model="m", batching_mode=mode) for mode in get_args(BatchingMode)),
        EngineConfig(model="m", batching_mode="static", padding="none"),
    ]
    answers = [
        (config.batching_mode, policy.joins, policy.keeps_together, policy.pads)
        for config in configs
        for policy in [build_policy(config)]
    ]
    assert answers == [
        ("none", False, False, False),
        ("static", False, True, True),
        ("dynamic", False, False, False),
        ("continuous", True, False, False),
        ("static", False, True, False),
    ]
