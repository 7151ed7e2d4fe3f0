"""Tests random histories of a scheduler for the task that embeds, with a fake encoder that sees only plans.

The encoder's vector depends on every token of the prompt, so a prompt that is cut, mixed up or computed for somebody
else shows up in somebody's answer.
"""

import struct
import zlib
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.engine.builders import make_scheduler, names_of
from tests.engine.executors import AtOnce, FailsLate, Wired
from tests.engine.scheduling.histories import SchedulerHistory, run_histories
from tests.engine.scheduling.shares_by_hand import SharesByHand
from tests.engine.scheduling.turns import Turns

from conveyor_engine.errors import Overloaded
from conveyor_engine.loop import step_runner
from conveyor_engine.loop.executor import Sample
from conveyor_engine.loop.overlap import Overlap
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput
from conveyor_engine.wire.step import StepPlan, StepResult

PAYLOAD = PoolingParams().encode()
BUDGET = 12
MAX_MODEL_LEN = 20  # longer than the budget: such a prompt has a step to itself
MAX_QUEUED = 6
LENGTHS = (1, 2, 4, 7, 12, 13, 20)


def vector_of(token_ids: list[int]) -> bytes:
    return struct.pack("f", zlib.crc32(repr(token_ids).encode()) / 2**32)


class PretendedEncoder:
    """An executor without state between steps, so a plan must contain everything that it computes."""

    def __init__(self) -> None:
        self.breaks = False  # the next vector is not finite
        self.poison: set[int] = set()  # first tokens of prompts that no step survives

    def free_memory(self) -> None:
        pass

    def begin(self, plan: StepPlan) -> Sample:
        brought = {row.row: row for row in plan.admitted}
        assert brought.keys() == set(plan.rows)
        assert set(plan.num_computed_tokens) == {0}, "no prompt is cut"
        assert set(plan.num_logits) == {1}, "each gives its one vector"
        assert not plan.new_blocks
        assert not any(row.block_ids for row in plan.admitted), "nothing is kept"
        assert plan.num_tokens == [len(brought[row].token_ids) for row in plan.rows], "and none is padded"
        assert all((row.sampling, row.payload) == (None, PAYLOAD) for row in plan.admitted)
        if self.poison.intersection(brought[row].token_ids[0] for row in plan.rows):
            raise RuntimeError("out of memory")
        vectors = [vector_of(list(brought[row].token_ids)) for row in plan.rows]
        if self.breaks:
            self.breaks, vectors[0] = False, b""
        return lambda _: lambda: StepResult(plan.number, [], payloads=vectors)


class EmbeddingHistory(SchedulerHistory):
    """add, abort, step, let time pass, break a vector, make steps raise; perhaps drain. Results come up to
    two late; so do errors."""

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
            padding="real" if self.mode == "static" else None,  # which an encoder's batch never has
            num_kv_blocks=0,
            max_num_seqs=1 if self.mode == "none" else max_num_seqs,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_MODEL_LEN,
            max_num_queued_requests=MAX_QUEUED,
            batching_window_seconds=1.0 if self.mode in ("static", "dynamic") else None,
            task="embed",
            of_task=EmbeddingFacts(size=8).encode(),
            clock=self.shares.read,
        )
        self.shares.watch(self.scheduler)
        self.model = PretendedEncoder()
        self.executor = FailsLate(Wired(self.model)) if fails_late else Wired(self.model)
        self.overlap = Overlap(self.executor, AtOnce(), num_ahead)
        self.turns = Turns(by_length=False)
        self.num_parties = 0
        self.added: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.num_prompt_tokens = 0  # of the vectors
        self.drains = drains

    @rule(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=4), together=st.booleans())
    def add(self, lengths: list[int], together: bool) -> None:
        self.num_parties += 1
        for length in lengths:
            number = len(self.added)
            prompt = [1000 + number, *range(length - 1)]
            request = EngineRequest(
                request_id=f"r{number}",
                party=f"p{self.num_parties}" if together else None,
                prompt_token_ids=prompt,
                payload=PAYLOAD,
                arrival_time=self.now,
            )
            try:
                self.scheduler.add_request(request)
            except Overloaded:
                continue
            self.added[request.request_id] = prompt
            self.turns.came(self.scheduler.requests[request.request_id])

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
            self.model.poison.add(self.added[live[choice % len(live)]][0])

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        self.turns.check(self.scheduler)
        if plan is not None:
            assert sum(plan.num_tokens) <= BUDGET or len(plan.rows) == 1
            self.happened["batches"] += len(plan.rows) > 1
            self.happened["longer than the budget"] += sum(plan.num_tokens) > BUDGET
            self.happened["batches of several steps"] += any(not r.num_awaited_tokens for r in self.scheduler.running)
        self.overlap.step(self.scheduler, plan)
        for output in self.scheduler.take_outputs():
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        assert output.request_id not in self.ended
        self.shares.check(output)
        assert output.finish_reason is not None, "one output tells all"
        self.ended[output.request_id] = output.finish_reason
        self.happened[output.finish_reason] += 1
        if output.payload is None:
            assert output.finish_reason is not FinishReason.STOP
        else:  # one that is aborted while its batch is not over tells what was held for it
            assert output.finish_reason in (FinishReason.STOP, FinishReason.ABORT)
            assert output.payload == vector_of(self.added[output.request_id])
            self.num_prompt_tokens += len(self.added[output.request_id])

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        places = names_of([*scheduler.waiting, *scheduler.running])
        assert sorted(places) == sorted(scheduler.requests)
        rows = [request.row for request in scheduler.running if request.row >= 0]
        assert sorted(rows + scheduler._batch._tables.free_rows) == list(range(scheduler._facts.max_num_seqs))

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.finish(1_000)
        self.shares.check_sums(self.scheduler)
        stats = self.scheduler.stats()
        assert (stats.padding_tokens, stats.generation_tokens, stats.num_preemptions) == (0, 0, 0)
        assert stats.kv_cache_usage == 0.0
        assert stats.prompt_tokens == self.num_prompt_tokens


@pytest.mark.parametrize("mode", ["none", "static", "dynamic", "continuous"])
def test_no_history_loses_a_prompt_or_a_part_of_it(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(step_runner._log, "disabled", True)
    happened: Counter[str] = Counter()
    machine = type("ModeHistory", (EmbeddingHistory,), {"mode": mode, "happened": happened})
    own = {"stop", "abort", "error", "late errors", "longer than the budget"}
    own |= {"turns taken from others"}
    own |= set() if mode == "none" else {"batches"}
    run_histories(machine, happened, own)
    rare = {"batches of several steps"} if mode != "none" else set()  # after a step that raised
    assert own <= set(+happened) <= own | rare
