"""Tests when each mode starts a batch, and which requests are in it."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from tests.engine.builders import make_limits, make_state, names_of

from conveyor_engine.config.engine_config import BatchingMode, EngineConfig
from conveyor_engine.scheduling.filling import BatchLimits
from conveyor_engine.scheduling.limits import Limits
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
from conveyor_engine.scheduling.waiting_queue import WaitingQueue


def states(*prompts: int, arrivals: Sequence[float] = (), **params: Any) -> list[RequestState]:
    """Make states of requests, one for each HTTP request, named by their positions."""
    times = arrivals or [0.0] * len(prompts)
    return [
        make_state(length, request_id=str(place), arrival_time=time, **params)
        for place, (length, time) in enumerate(zip(prompts, times, strict=True))
    ]


def queue_of(policy: Policy, waiting: list[RequestState]) -> WaitingQueue:
    queue = WaitingQueue(policy.bucket)
    for request in waiting:
        queue.add(request)
    return queue


def named(
    policy: Policy, waiting: list[RequestState], now: float, *, draining: bool = False
) -> tuple[list[int], str | None]:
    """Return the indices of the chosen requests in `waiting`, and the reason."""
    requests, reason = policy.candidates(queue_of(policy, waiting), now, draining)
    return [waiting.index(request) for request in requests], reason


def due_at(policy: Policy, waiting: list[RequestState]) -> float:
    return policy.due_at(queue_of(policy, waiting))


def test_none_takes_the_oldest_alone() -> None:
    waiting = states(4, 4)
    assert named(NoBatching(make_limits(1)), waiting, 0.0) == ([0], "full")
    assert named(NoBatching(make_limits(1)), [], 0.0) == ([], None)


def test_continuous_takes_everybody_at_once_and_never_closes() -> None:
    assert named(Continuous(make_limits(1)), states(4, 4), 0.0) == ([0, 1], None)


def test_static_starts_when_full() -> None:
    policy = Static(make_limits(2), 5.0, pads=True)
    assert named(policy, states(4, arrivals=[1.0]), 1.0) == ([], None)
    waiting = states(4, 4, arrivals=[1.0, 2.0])
    assert named(policy, waiting, 2.0) == ([0, 1], "full")
    assert due_at(policy, waiting) <= 2.0


def test_static_starts_when_its_first_request_has_waited_long_enough() -> None:
    policy = Static(make_limits(3), 5.0, pads=True)
    waiting = states(4, 4, arrivals=[1.0, 4.0])
    assert due_at(policy, waiting) == 6.0
    assert named(policy, waiting, 5.9) == ([], None)
    assert named(policy, waiting, 6.0) == ([0, 1], "window")


@pytest.mark.parametrize("policy", [Static(make_limits(3), 5.0, pads=True), Dynamic(make_limits(3), 5.0)])
def test_a_drain_does_not_wait_for_the_window(policy: Policy) -> None:
    assert named(policy, states(4, arrivals=[1.0]), 1.0, draining=True) == ([0], "drain")


def test_the_dynamic_window_runs_from_the_first_request_not_from_the_last() -> None:
    policy = Dynamic(make_limits(3), 1.0)
    waiting = states(4, 4, arrivals=[1.0, 1.9])
    assert due_at(policy, waiting) == 2.0
    assert named(policy, waiting, 1.99) == ([], None)
    assert named(policy, waiting, 2.0) == ([0, 1], "window")


def test_dynamic_groups_by_length() -> None:
    assert named(Dynamic(make_limits(2), 1.0), states(5, 50, 6, max_tokens=5), 0.0) == ([0, 2], "full")


@pytest.mark.parametrize(
    "policy", [Dynamic(make_limits(2), 1.0, groups=False), Static(make_limits(2), 1.0, pads=True, groups=False)]
)
def test_without_grouping_the_order_of_the_queue_alone_decides(policy: Policy) -> None:
    assert named(policy, states(5, 50, 6), 0.0) == ([0, 1], "full")


def test_static_groups_by_length_too() -> None:
    assert named(Static(make_limits(2), 1.0, pads=True), states(5, 50, 6, max_tokens=5), 0.0) == ([0, 2], "full")


def test_a_batch_with_room_takes_every_length_whose_window_is_over_and_what_goes_before_it() -> None:
    policy = Dynamic(make_limits(4), 1.0)
    waiting = states(5, 50, 6, 60, arrivals=[0.0, 0.1, 0.2, 0.3], max_tokens=5)
    assert named(policy, waiting, 1.0) == ([0, 2], "window"), "the long ones have time"
    assert named(policy, waiting, 1.1) == ([0, 2, 1], "window")
    better = make_state(50, "better", arrival_time=1.0, max_tokens=5)
    late = make_state(60, "late", arrival_time=0.0, max_tokens=5, level=1)
    assert named(policy, [waiting[0], better, late], 1.0) == ([0, 1, 2], "window"), "no late one overtakes a better one"


def test_a_full_batch_of_like_length_leaves_others_behind_that_are_due() -> None:
    waiting = states(5, 50, 6, max_tokens=5)
    assert named(Dynamic(make_limits(2), 1.0), waiting, 9.0) == ([0, 2], "full")
    assert named(Dynamic(make_limits(2), 1.0), waiting[1:], 9.0) == ([0, 1], "window"), (
        "and the next one has the oldest"
    )


def test_a_padded_batch_costs_its_number_times_its_longest_prompt() -> None:
    waiting = states(30, 20, 33, 25, max_tokens=30)
    assert named(Static(make_limits(8, 99, padded=True), 1.0, pads=True), waiting, 0.0) == ([0, 1, 2], "cost")
    assert named(Static(make_limits(8, 98, padded=True), 1.0, pads=True), waiting, 0.0) == ([0, 1], "cost")
    assert named(Static(make_limits(8, 108), 1.0, pads=False), waiting, 1.0) == ([0, 1, 2, 3], "window"), (
        "packed: their sum"
    )


@pytest.mark.parametrize(
    "policy", [Static(make_limits(3), 5.0, pads=True, eager=True), Dynamic(make_limits(3), 5.0, eager=True)]
)
def test_an_eager_policy_does_not_wait_for_the_window(policy: Policy) -> None:
    waiting = states(4, 4, arrivals=[1.0, 2.0])
    assert due_at(policy, waiting) <= 2.0
    assert named(policy, waiting, 2.0) == ([0, 1], "eager")
    assert named(policy, states(4, 50, 4, 4), 0.0) == ([0, 2, 3], "full")
    assert named(policy, states(4, 50, 4), 0.0) == ([0, 2], "eager"), "it groups as long as a window allows"


def test_what_a_batch_costs_follows_from_mode_padding_and_task() -> None:
    def limits(mode: str, one_step: int | None = None, packs: bool = False, **config: Any) -> BatchLimits:
        engine = EngineConfig(model="m", batching_mode=mode, max_num_seqs=8, **config)  # type: ignore[arg-type]
        return build_policy(engine, Limits(8, 1000), packs=packs, one_step_cost=one_step).limits

    assert limits("static") == make_limits(8, math.inf, padded=True)
    assert limits("static", max_num_batched_tokens=64) == make_limits(8, 64, padded=True)
    assert limits("static", max_num_batched_tokens=64, padding="none") == make_limits(8, 64)
    assert limits("dynamic", max_num_batched_tokens=64) == make_limits(8, 64)
    for mode in ("static", "dynamic"):
        assert limits(mode, 256, packs=True) == make_limits(8, 256), "a batch is a step"
        assert limits(mode, 256) == make_limits(8, 256, padded=True), "whose task computes a padded tensor"


def test_a_full_dynamic_group_starts_before_an_older_one_that_still_waits() -> None:
    policy = Dynamic(make_limits(2), 10.0)
    waiting = states(50, 5, 5, arrivals=[1.0, 2.0, 3.0])
    assert named(policy, waiting, 3.0) == ([1, 2], "full")
    assert named(policy, waiting, 11.0) == ([0], "window"), "once due, the oldest goes first: nobody starves"


def test_a_dynamic_batch_is_of_the_party_that_has_waited_longest_for_a_turn() -> None:
    policy = Dynamic(make_limits(2), 0.0)
    waiting = [make_state(length, f"{length} {number}", party="many") for length in (5, 50) for number in range(4)]
    queue = queue_of(policy, [*waiting, make_state(50, "one", arrival_time=1.0)])
    batches = []
    while batch := list(policy.candidates(queue, 1.0, False).requests):
        batches.append(names_of(batch))
        for request in batch:
            queue.pop(request)
    assert batches == [["5 0", "5 1"], ["one", "50 0"], ["5 2", "5 3"], ["50 1", "50 2"], ["50 3"]]


def test_a_closed_batch_is_filled_by_turns_and_its_window_runs_from_the_first_that_waits() -> None:
    for policy in (Static(make_limits(3), 1.0, pads=True), Dynamic(make_limits(3), 1.0)):
        waiting = [make_state(4, str(number), party="many") for number in range(5)]
        waiting.append(make_state(4, "one", arrival_time=0.9))
        assert named(policy, waiting, 0.9) == ([0, 5, 1], "full")
        assert due_at(policy, waiting[-2:]) == 1.0


def test_the_size_of_a_step_closes_no_dynamic_batch() -> None:
    waiting = states(*[128] * 32, max_tokens=16)
    policy = build_policy(EngineConfig(model="m", batching_mode="dynamic", max_num_seqs=32), Limits(32, 1000))
    assert named(policy, waiting, 0.0) == (list(range(32)), "full")
    assert named(policy, waiting[:31], 1.0) == (list(range(31)), "window")
    built = build_policy(
        EngineConfig(model="m", batching_mode="dynamic", max_num_seqs=32, max_num_batched_tokens=1024), Limits(32, 1000)
    )
    assert named(built, waiting, 0.0) == (list(range(8)), "cost")


def test_dynamic_groups_by_the_length_to_be_expected_not_by_the_longest_possible() -> None:
    first, second, third = waiting = states(5, 500, 5, max_tokens=4500)
    assert named(Dynamic(make_limits(2), 1.0), waiting, 0.0) == ([0, 1], "full")
    first.expected_total_tokens = third.expected_total_tokens = 105
    second.expected_total_tokens = 600
    assert named(Dynamic(make_limits(2), 1.0), waiting, 0.0) == ([0, 2], "full")


def test_dynamic_closes_a_batch_that_reaches_its_own_token_limit() -> None:
    policy = Dynamic(make_limits(8, 100), 10.0)
    waiting = states(40, 45, 42)
    assert named(policy, waiting, 0.0) == ([0, 1], "cost")
    assert due_at(policy, waiting) == 0.0


def test_a_prompt_larger_than_the_budget_is_taken_alone() -> None:
    assert named(Dynamic(make_limits(8, 10), 1.0), states(40), 5.0) == ([0], "window")


@pytest.mark.parametrize(("mode", "window"), [("static", STATIC_WINDOW_SECONDS), ("dynamic", DYNAMIC_WINDOW_SECONDS)])
def test_the_window_defaults_by_mode_and_may_be_set(mode: str, window: float) -> None:
    waiting = states(4, arrivals=[7.0])
    default = EngineConfig(model="m", batching_mode=mode)  # type: ignore[arg-type]
    assert due_at(build_policy(default, Limits(8, 1000)), waiting) == 7.0 + window
    given = EngineConfig(model="m", batching_mode=mode, batching_window_seconds=0.5)  # type: ignore[arg-type]
    assert due_at(build_policy(given, Limits(8, 1000)), waiting) == 7.5


def test_the_modes_differ_in_who_joins_who_keeps_together_and_what_is_padded() -> None:
    configs = [
        *(EngineConfig(model="m", batching_mode=mode) for mode in get_args(BatchingMode)),
        EngineConfig(model="m", batching_mode="static", padding="none"),
    ]
    answers = [
        (config.batching_mode, policy.joins, policy.keeps_together, policy.pads)
        for config in configs
        for policy in [build_policy(config, Limits(8, 1000))]
    ]
    assert answers == [
        ("auto", True, False, False),
        ("none", False, False, False),
        ("static", False, True, True),
        ("dynamic", False, False, False),
        ("continuous", True, False, False),
        ("static", False, True, False),
    ]
