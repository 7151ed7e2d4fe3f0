"""Tests batches by length and by cost, in virtual time: their bounds on a request's wait, and what they save."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.builders import make_facts, make_limits, make_request, make_scheduler, make_state, run_step

from conveyor_engine.scheduling.filling import BatchLimits, Filling
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.policy import Dynamic
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.token_budget import TokenBudget
from conveyor_engine.scheduling.waiting_queue import WaitingQueue
from conveyor_engine.tasks.embed.facts import EmbeddingFacts
from conveyor_engine.wire.request import EngineRequest

WINDOW = 1.0


@dataclass
class Batch:
    """A batch that started at `at`, and the requests that were left in the queue, in its order."""

    at: float
    reason: str
    requests: list[RequestState]
    left: list[RequestState]


def cost_of(limits: BatchLimits, requests: list[RequestState]) -> int:
    costs = [request.step_cost for request in requests]
    return len(costs) * max(costs) if limits.padded else sum(costs)


def simulate(policy: Dynamic, arrivals: list[RequestState], step_seconds: float) -> Iterator[Batch]:
    """Yield each batch of a device that takes `step_seconds` for any batch. Calls the policy as the scheduler does."""
    queue, coming, free_at = WaitingQueue(policy.bucket), sorted(arrivals, key=lambda r: r.arrival_time), 0.0
    while coming or len(queue):
        due = max(free_at, policy.due_at(queue)) if len(queue) else math.inf
        if coming and coming[0].arrival_time <= due:
            queue.add(coming.pop(0))
            continue
        requests, reason = policy.candidates(queue, due, False)
        batch = list(requests)
        assert batch, "due_at tells when a batch starts"
        assert reason is not None
        for request in batch:
            queue.pop(request)
        yield Batch(due, reason, batch, list(queue))
        free_at = due + step_seconds


ARRIVALS = st.lists(st.tuples(st.floats(0, 5), st.integers(1, 100)), min_size=1, max_size=40)


def states(arrivals: list[tuple[float, int]]) -> list[RequestState]:
    return [
        make_state(length, str(number), arrival_time=time, max_tokens=1)
        for number, (time, length) in enumerate(arrivals)
    ]


@given(
    arrivals=ARRIVALS,
    limits=st.builds(make_limits, st.integers(1, 6), st.sampled_from((math.inf, 300, 80)), st.booleans()),
    groups=st.booleans(),
    eager=st.booleans(),
    step_seconds=st.sampled_from((0.1, 0.7, 3.0)),
)
def test_no_request_waits_longer_than_its_window_because_of_grouping(
    arrivals: list[tuple[float, int]], limits: BatchLimits, groups: bool, eager: bool, step_seconds: float
) -> None:
    """After its window, a request is left only by full batches, and the device is never idle while it waits."""
    policy, waiting = Dynamic(limits, WINDOW, groups=groups, eager=eager), states(arrivals)
    seen, free_at = Counter[str](), 0.0
    for batch in simulate(policy, waiting, step_seconds):
        seen.update(request.request_id for request in batch.requests)
        assert len(batch.requests) <= limits.num_rows
        assert len(batch.requests) == 1 or cost_of(limits, batch.requests) <= limits.cost
        is_full = len(batch.requests) == limits.num_rows or any(
            cost_of(limits, [*batch.requests, other]) > limits.cost for other in batch.left
        )
        due = [request for request in batch.left if request.arrival_time + WINDOW <= batch.at]
        assert is_full or not due
        first_due = min(request.arrival_time for request in [*batch.requests, *batch.left]) + WINDOW
        assert batch.at <= max(first_due, free_at), "the device is idle no longer than a window"
        if eager:
            latest = max(request.arrival_time for request in batch.requests)
            assert batch.at <= max(latest, free_at), "nor at all"
        if not groups:
            everybody = [*batch.requests, *batch.left]
            assert everybody == sorted(everybody, key=lambda request: (request.arrival_time, waiting.index(request)))
        free_at = batch.at + step_seconds
    assert seen == Counter(request.request_id for request in waiting), "nothing is lost or doubled"


@given(arrivals=ARRIVALS, rows=st.integers(1, 4), step_seconds=st.sampled_from((0.5, 3.0)))
def test_under_a_backlog_at_most_the_full_batches_of_older_requests_go_before_one(
    arrivals: list[tuple[float, int]], rows: int, step_seconds: float
) -> None:
    """So grouping delays a request by at most one batch for each other length, besides the requests before it."""
    policy, waiting = Dynamic(make_limits(rows), WINDOW), states(arrivals)
    batches = list(simulate(policy, waiting, step_seconds))
    for number, batch in enumerate(batches):
        for request in batch.requests:
            before = [other for other in batches[:number] if other.at >= request.arrival_time + WINDOW]
            older = Counter(
                policy.bucket(other)
                for earlier in before
                for other in earlier.requests
                if other.arrival_time <= request.arrival_time
            )
            assert len(before) <= sum(-(-count // rows) for count in older.values())


@given(
    costs=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    rows=st.integers(1, 8),
    most=st.integers(1, 200),
    padded=st.booleans(),
)
def test_a_batch_is_full_by_rows_or_by_cost_and_a_lone_request_always_fits(
    costs: list[int], rows: int, most: int, padded: bool
) -> None:
    limits, requests = make_limits(rows, most, padded), [make_state(cost, str(n)) for n, cost in enumerate(costs)]
    batch = Filling(limits)
    batch.extend(requests)
    taken = len(batch.requests)
    assert batch.requests == requests[:taken]
    assert 1 <= taken <= rows
    assert batch.cost == cost_of(limits, batch.requests)
    assert taken == 1 or batch.cost <= most
    assert batch.padding_share == pytest.approx(1 - sum(costs[:taken]) / batch.cost)
    if taken < len(costs):
        reason = "full" if taken == rows else "cost"
        assert batch.full == reason
        assert reason == "full" or cost_of(limits, requests[: taken + 1]) > most


def run_backlog(grouping: str, **changes: object) -> tuple[float, int, Counter[str]]:
    """Run 256 prompts of mixed lengths; a token costs a millisecond. Returns (seconds, dummy tokens, answers)."""
    scheduler = make_scheduler(
        "static", padding="real", length_grouping=grouping, max_num_seqs=8, max_num_queued_requests=300,
        num_kv_blocks=2048, max_model_len=256, max_num_batched_tokens=2048, **changes,
    )  # fmt: skip
    random, now, answers = Random(1), 0.0, Counter[str]()
    for number in range(256):
        length = min(200, max(1, round(random.lognormvariate(3.3, 1.0))))
        scheduler.add_request(make_request(str(number), [number] * length, max_tokens=8))
    while scheduler.has_unfinished():
        outputs = run_step(scheduler, now=now)
        now += 0.001 * scheduler.stats().step_num_tokens
        answers.update(name for name, output in outputs.items() if output.finish_reason)
    return now, scheduler.stats().padding_tokens, answers


def test_grouping_saves_most_of_the_padding_of_a_static_backlog() -> None:
    seconds, padding, answers = run_backlog("auto")
    plain_seconds, plain_padding, plain_answers = run_backlog("off")
    assert answers == plain_answers == Counter(map(str, range(256)))
    assert padding < 0.4 * plain_padding
    assert seconds < 0.7 * plain_seconds


def test_the_statistics_of_a_batch_are_those_of_the_one_that_closed_last() -> None:
    scheduler = make_scheduler("static", padding="real", max_num_seqs=2)
    for number, length in enumerate((4, 12)):
        scheduler.add_request(make_request(str(number), length, arrival_time=1.0 + number))
    run_step(scheduler, now=3.5)
    stats = scheduler.stats()
    assert (stats.num_batches, stats.batch_cost, stats.batch_wait_seconds) == (1, 24, 2.5)
    assert stats.batch_padding_share == pytest.approx(8 / 24)


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_batch_of_one_step_requests_is_a_step(mode: str) -> None:
    scheduler = make_scheduler(
        mode,
        task="embed",
        of_task=EmbeddingFacts(size=8).encode(),
        num_kv_blocks=0,
        max_num_seqs=8,
        max_num_batched_tokens=32,
    )
    for number in range(6):
        scheduler.add_request(EngineRequest(request_id=str(number), prompt_token_ids=[1] * 12))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.num_tokens == [12, 12]
    assert scheduler.stats().batch_close_reasons == {"cost": 1}


def test_a_step_of_a_task_that_pads_costs_its_number_times_its_largest_request() -> None:
    facts = make_facts(max_num_batched_tokens=30)
    budget = TokenBudget(facts, Limits.declared(facts), joins=True, whole_prompts=True, packs=False)
    step = Step(0)
    for length, expected in ((4, 4), (10, 10), (11, 0), (10, 10), (1, 0)):
        request = make_state(length, str(length))
        assert budget.chunk(step, request) == expected
        if expected:
            step.add(request, expected)
