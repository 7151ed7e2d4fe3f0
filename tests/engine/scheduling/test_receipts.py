"""Tests what receipts say about single requests. `shares_by_hand` compares the engine seconds of random histories."""

from typing import Any

import pytest
from tests.engine.builders import make_request, make_scheduler, result_of

from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.tasks.custom.facts import CustomFacts
from conveyor_engine.wire.request import EngineRequest, Receipt
from conveyor_engine.wire.step import StepResult
from conveyor_engine.wire.tensors import Signature, TensorSpec


class Timed:
    """A scheduler whose steps take as long as `step` says."""

    def __init__(self, mode: str, **changes: Any) -> None:
        self.now = 0.0
        self.scheduler: Scheduler = make_scheduler(mode, clock=lambda: self.now, **changes)
        self.receipts: dict[str, Receipt] = {}

    def add(self, name: str, prompt: int, **params: Any) -> None:
        self.scheduler.add_request(make_request(name, prompt, arrival_time=self.now, **params))

    def step(self, seconds: float) -> None:
        plan = self.scheduler.schedule(self.now)
        assert plan is not None
        self.now += seconds
        self.scheduler.update(result_of(plan))
        self.take()

    def take(self) -> None:
        for output in self.scheduler.take_outputs():
            if output.finish_reason is not None:
                assert output.receipt is not None
                self.receipts[output.request_id] = output.receipt


def test_a_request_alone_gets_the_time_of_all_its_steps() -> None:
    engine = Timed("continuous")
    engine.add("a", prompt=5, max_tokens=3)
    engine.now = 2.0  # the engine was busy elsewhere
    for seconds in (0.5, 0.25, 0.125):
        engine.step(seconds)
    assert engine.receipts["a"] == Receipt(
        engine_seconds=0.875, queue_seconds=2.0, prefill_seconds=0.5, decode_seconds=0.375
    )


def test_a_step_is_divided_by_tokens() -> None:
    engine = Timed("continuous")
    engine.add("old", prompt=4, max_tokens=2)
    engine.step(1.0)
    engine.add("new", prompt=4, max_tokens=1)
    engine.step(1.0)  # one decode, and four tokens of a prompt
    assert engine.receipts["old"].engine_seconds == pytest.approx(1.2)
    assert engine.receipts["new"].engine_seconds == pytest.approx(0.8)
    assert (engine.receipts["old"].neighbours, engine.receipts["new"].neighbours) == (0.5, 1.0)


def test_a_row_pays_for_its_dummies_and_they_are_padding() -> None:
    engine = Timed("static", padding="real")
    engine.add("short", prompt=2, max_tokens=1)
    engine.add("long", prompt=6, max_tokens=3)
    engine.scheduler.drain()
    while engine.scheduler.has_unfinished():
        engine.step(1.0)
    short, long = engine.receipts["short"], engine.receipts["long"]
    assert short.engine_seconds + long.engine_seconds == pytest.approx(engine.now)
    assert short.padding_seconds > long.padding_seconds == 0.0
    assert short.padding_seconds < short.engine_seconds
    assert engine.scheduler.stats().padding_tokens > 0


def test_the_window_counts_from_the_end_of_the_batch_before() -> None:
    engine = Timed("dynamic", batching_window_seconds=4.0, max_num_seqs=2)
    engine.add("a", prompt=4, max_tokens=1)
    engine.add("b", prompt=4, max_tokens=1)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None, "the batch is full"
    engine.now = 1.0
    engine.add("c", prompt=4, max_tokens=1)
    engine.now = 3.0
    engine.scheduler.update(result_of(plan))
    engine.now = 5.0
    engine.step(1.0)
    engine.take()
    assert engine.receipts["a"].close_reason == "full"
    c = engine.receipts["c"]
    assert (c.close_reason, c.queue_seconds, c.batch_wait_seconds, c.prefill_seconds) == ("window", 2.0, 2.0, 1.0)


def test_an_abort_ends_a_receipt_with_the_steps_so_far() -> None:
    engine = Timed("continuous")
    engine.add("a", prompt=4, max_tokens=9)
    engine.add("b", prompt=4, max_tokens=9)
    engine.step(1.0)
    engine.step(1.0)
    engine.scheduler.abort("a")
    engine.take()
    assert engine.receipts["a"].engine_seconds == 1.0
    engine.step(1.0)
    engine.scheduler.abort("b")
    engine.take()
    assert engine.receipts["b"].engine_seconds == 2.0
    assert engine.scheduler.stats().busy_seconds == 3.0


def test_a_request_that_never_ran_has_waited_and_cost_nothing() -> None:
    engine = Timed("continuous")
    engine.add("a", prompt=4)
    engine.now = 3.0
    engine.scheduler.abort("a")
    engine.take()
    assert engine.receipts["a"] == Receipt(queue_seconds=3.0)


def test_a_step_whose_requests_have_all_ended_belongs_to_nobody() -> None:
    engine = Timed("continuous")
    engine.add("a", prompt=4, max_tokens=9)
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    engine.scheduler.abort("a")
    engine.now = 1.0
    engine.scheduler.update(result_of(plan))
    engine.take()
    stats = engine.scheduler.stats()
    assert (engine.receipts["a"].engine_seconds, stats.busy_seconds, stats.unclaimed_seconds) == (0.0, 0.0, 1.0)


def test_a_batch_that_the_model_pads_is_divided_by_rows() -> None:
    signature = Signature((TensorSpec("x", "FP32", ("n",)),), (TensorSpec("y", "FP32", (1,)),), {"n": (1, 8)})
    facts = CustomFacts(signature, packs=False).encode()
    engine = Timed("continuous", task="custom", of_task=facts, num_kv_blocks=0, max_model_len=16)
    for name, cost in (("a", 2), ("b", 8)):
        engine.scheduler.add_request(EngineRequest(request_id=name, payload=b"x", payload_cost=cost))
    plan = engine.scheduler.schedule(0.0)
    assert plan is not None
    engine.now = 4.0
    engine.scheduler.update(StepResult(plan.number, [], payloads=[b"\0first", b"\0second"]))
    engine.take()
    a, b = engine.receipts["a"], engine.receipts["b"]
    assert (a.engine_seconds, a.padding_seconds) == (2.0, 1.5)
    assert (b.engine_seconds, b.padding_seconds) == (2.0, 0.0)


def test_a_receipt_has_the_times_of_the_first_preemptions() -> None:
    engine = Timed("continuous", num_kv_blocks=6, block_size=4, max_num_seqs=2)
    engine.add("old", prompt=8, max_tokens=10)
    engine.add("new", prompt=8, max_tokens=10)
    while engine.scheduler.has_unfinished():
        engine.step(1.0)
    assert engine.receipts["old"].preempted_at == ()
    (first, *_) = times = engine.receipts["new"].preempted_at
    assert 0 < first < engine.now
    assert list(times) == sorted(times)
    assert len(times) == engine.scheduler.stats().num_preemptions <= 8
