"""Random histories of a scheduler whose task makes pictures, against a pretended model that sees plans only.

The model counts the steps of each row. So a step that is left out, taken twice, or taken for somebody else shows up in
somebody's picture.
"""

import zlib
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.engine.builders import make_scheduler
from tests.engine.executors import AtOnce, FailsLate, Wired
from tests.engine.scheduling.histories import SchedulerHistory, run_histories
from tests.engine.scheduling.shares_by_hand import SharesByHand
from tests.engine.scheduling.turns import Turns

from conveyor_engine.errors import Overloaded
from conveyor_engine.loop import step_runner
from conveyor_engine.loop.executor import Sample
from conveyor_engine.loop.overlap import Overlap
from conveyor_engine.tasks.imagegenerate.facts import GOES_ON, PaintFacts, Size, build_params
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput
from conveyor_engine.wire.step import StepPlan, StepResult

COSTS = (4, 7)
BUDGET = 16
MAX_QUEUED = 6
FACTS = PaintFacts(
    size=Size(8, 8),
    multiple=8,
    max_pixels=64,
    max_side=32,
    empty_tokens=[bytes(4)],
    nums_forwards=[1, 2],
    num_steps=2,
    guidance=2.0,
    guides=True,
    strength=0.8,
    rounds_up=False,
)


def picture_of(payload: bytes, num_steps: int) -> bytes:
    return b"picture" + zlib.crc32(payload + bytes(num_steps)).to_bytes(4, "little")


class PretendedPainter:
    """Keeps the number of steps of each row, and takes no step twice."""

    def __init__(self) -> None:
        self.breaks = False  # the next picture is not finite
        self.poison: set[bytes] = set()  # payloads that no step survives
        self.rows: dict[int, tuple[bytes, int]] = {}

    def free_memory(self) -> None:
        pass

    def begin(self, plan: StepPlan) -> Sample:
        computed = dict(zip(plan.rows, plan.num_computed_tokens, strict=True))
        for row in plan.admitted:
            assert not row.block_ids
            assert row.sampling is not None
            if not computed[row.row] or self.rows.get(row.row, (b"", 0))[0] != row.payload:
                assert not computed[row.row], "what it has of a row is of another request"
                self.rows[row.row] = row.payload, 0
        if self.poison.intersection(self.rows[row][0] for row in plan.rows):
            raise RuntimeError("out of memory")
        payloads = []
        for row, before, cost, is_last in zip(
            plan.rows, plan.num_computed_tokens, plan.num_tokens, plan.num_logits, strict=True
        ):
            payload, num_done = self.rows[row]
            assert before % cost == 0, "each step has one cost"
            assert num_done >= before // cost, "a step was left out"
            if num_done == before // cost:
                self.rows[row] = payload, num_done + 1
            payloads.append(picture_of(payload, before // cost + 1) if is_last else GOES_ON)
        if self.breaks:
            self.breaks, payloads[0] = False, b""
        return lambda _: lambda: StepResult(plan.number, [], payloads=payloads)


class PictureHistory(SchedulerHistory):
    """add, abort, step, let time pass, break a picture, make steps raise; perhaps drain. Results come up to two late;
    so do errors."""

    @initialize(
        max_num_seqs=st.sampled_from((4, 4, 2, 1)),
        num_ahead=st.sampled_from((0, 1, 2)),
        fails_late=st.booleans(),
        drains=st.booleans(),
    )
    def begin(self, max_num_seqs: int, num_ahead: int, fails_late: bool, drains: bool) -> None:
        self.now, self.shares = 0.0, SharesByHand(self)
        self.scheduler = make_scheduler(
            self.mode,
            num_kv_blocks=0,
            max_num_seqs=1 if self.mode == "none" else max_num_seqs,
            max_num_batched_tokens=BUDGET,
            max_model_len=max(COSTS),
            max_num_queued_requests=MAX_QUEUED,
            batching_window_seconds=1.0 if self.mode in ("static", "dynamic") else None,
            task="imagegenerate",
            of_task=FACTS.encode(),
            clock=self.shares.read,
        )
        self.shares.watch(self.scheduler)
        self.model = PretendedPainter()
        self.executor = FailsLate(Wired(self.model)) if fails_late else Wired(self.model)
        self.overlap = Overlap(self.executor, AtOnce(), num_ahead)
        self.turns = Turns(by_length=False)
        self.added: dict[str, EngineRequest] = {}
        self.ended: dict[str, FinishReason] = {}
        self.drains = drains

    @rule(pictures=st.lists(st.tuples(st.sampled_from(COSTS), st.integers(1, 6)), min_size=1, max_size=3))
    def add(self, pictures: list[tuple[int, int]]) -> None:
        for cost, num_steps in pictures:
            name = f"r{len(self.added)}"
            request = EngineRequest(
                request_id=name,
                payload=name.encode(),
                params=build_params(len(self.added)),
                payload_cost=cost,
                num_steps=num_steps,
                arrival_time=self.now,
            )
            try:
                self.scheduler.add_request(request)
            except Overloaded:
                continue
            self.added[name] = request

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        if live := list(self.scheduler.requests):
            self.scheduler.abort(live[choice % len(live)])

    @rule()
    def break_next(self) -> None:
        self.model.breaks = True

    @rule(choice=st.integers(0, 1000))
    def poison(self, choice: int) -> None:
        if live := list(self.scheduler.requests):
            self.model.poison.add(self.added[live[choice % len(live)]].payload)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        before = {request.request_id for request in self.scheduler.running}
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            assert sum(plan.num_tokens) <= BUDGET
            computed = plan.num_computed_tokens
            self.happened["shared steps"] += len(plan.rows) > 1
            self.happened["at several timesteps"] += len(set(computed)) > 1
            after = {request.request_id for request in self.scheduler.running}
            self.happened["joined"] += bool(before & after) and bool(after - before)
        self.overlap.step(self.scheduler, plan)
        for output in self.scheduler.take_outputs():
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        assert output.finish_reason is not None, "no previews were asked for"
        assert output.request_id not in self.ended
        self.shares.check(output)
        self.ended[output.request_id] = output.finish_reason
        self.happened[output.finish_reason] += 1
        if output.payload is not None:
            request = self.added[output.request_id]
            assert output.payload == picture_of(request.payload, request.num_steps)
        else:
            assert output.finish_reason is not FinishReason.STOP

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.finish(1_000)
            self.shares.check_sums(self.scheduler)
            assert self.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "continuous"])
def test_no_history_leaves_out_a_step_or_takes_it_twice(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(step_runner._log, "disabled", True)
    happened: Counter[str] = Counter()
    machine = type("ModeHistory", (PictureHistory,), {"mode": mode, "happened": happened})
    own = {"stop", "abort", "error", "late errors"} | (set() if mode == "none" else {"shared steps"})
    own |= {"joined", "at several timesteps"} if mode == "continuous" else set()
    run_histories(machine, happened, own)
    assert (happened["joined"] > 0) == (mode == "continuous")
