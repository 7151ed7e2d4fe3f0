"""A random history of the scheduler with a fake model, each of whose tokens depends on the whole prefix.

The pretended model remembers what each KV slot holds, and knows of requests what the plans say, which travel as
msgpack. So a block that is handed to two owners, shared before it is written, or forgotten too early shows up as a
foreign key, and as a wrong token in somebody's answer.
"""

import math
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from tests.engine.builders import make_request, make_scheduler, names_of
from tests.engine.executors import AtOnce, FailsLate, Wired
from tests.engine.pretended_constraints import PretendedMasks, SumModThree, TardySumModThree, next_allowed, next_token
from tests.engine.pretended_model import Generous, Oracle, PretendedModel
from tests.engine.scheduling.histories import SchedulerHistory
from tests.engine.scheduling.shares_by_hand import SharesByHand
from tests.engine.scheduling.turns import Turns

from conveyor_engine.errors import Overloaded
from conveyor_engine.loop import step_runner
from conveyor_engine.loop.overlap import Overlap
from conveyor_engine.scheduling.constraint import Constraint
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput
from conveyor_engine.wire.step import StepPlan

TARDY, ENDS = 2, 3  # `min_tokens` of requests whose masks are late, and of those among them whose answers end
BUDGET = 12
BLOCK_SIZE = 4
MAX_MODEL_LEN = 40
MAX_QUEUED = 6
# Few prompts, so that they repeat: of one token, of exactly one or two blocks, with common and with unlike heads.
HEAD = list(range(100, 108))
PROMPTS = ([5], HEAD[:4], HEAD, [*HEAD, 6], [*HEAD, *range(200, 208)], list(range(300, 313)), list(range(400, 422)))


class History(SchedulerHistory):
    """add, abort, step, let time pass, break a row's logits, make steps raise; perhaps drain.

    Results come up to two steps late; so do errors.
    """

    padding: str | None = None
    has_windows = False

    @initialize(
        # The smallest pool holds one request of MAX_MODEL_LEN tokens, and answers are longer than is expected at first:
        # so every mode must preempt.
        num_kv_blocks=st.sampled_from((10, 10, 11, 14, 24)),
        max_num_seqs=st.sampled_from((4, 4, 2, 1)),
        prefix_caching=st.sampled_from((True, True, False)),
        num_ahead=st.sampled_from((0, 1, 1, 2)),
        fails_late=st.booleans(),
        drains=st.booleans(),
        has_states=st.sampled_from((False, False, True)),
        class_shares=st.sampled_from(((), (), ((1, 50),), ((1, 75), (7, 25)))),
        tables=st.sampled_from(((1, 1), (1, 3), (2, 1), (0, 1))),
        window=st.sampled_from((1, 3, 4, 9)),
        encodes_beside=st.booleans(),
        speculates=st.sampled_from(("", "", "", "by texts", "by a model", "by a head")),
    )
    def begin(
        self,
        num_kv_blocks: int,
        max_num_seqs: int,
        prefix_caching: bool,
        num_ahead: int,
        fails_late: bool,
        drains: bool,
        has_states: bool,
        class_shares: tuple[tuple[int, int], ...],
        tables: tuple[int, int],
        window: int,
        encodes_beside: bool,
        speculates: str,
    ) -> None:
        self.now = 0.0
        if speculates := speculates if self.mode != "static" else "":
            num_ahead = 0  # the engine refuses drafts beside steps that are planned ahead
        kv_tables = ONE_TABLE
        if self.has_windows:
            kv_tables = KVTables(*tables, window=window, in_flight=(1 + num_ahead) * BUDGET)
            # One request of MAX_MODEL_LEN tokens needs 10 blocks with one table.
            num_kv_blocks += kv_tables.count_needed(MAX_MODEL_LEN, BLOCK_SIZE) - 10
            has_states = fails_late = False
        self.masks, self.shares = PretendedMasks(), SharesByHand(self)
        self.scheduler: Scheduler = make_scheduler(
            self.mode,
            padding=self.padding,
            num_kv_blocks=num_kv_blocks,
            max_num_seqs=1 if self.mode == "none" else max_num_seqs,
            prefix_caching=prefix_caching,
            max_num_batched_tokens=BUDGET,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_queued_requests=MAX_QUEUED,
            class_shares=class_shares,
            batching_window_seconds=1.0 if self.mode in ("static", "dynamic") else None,
            constrain=self._constrain,
            masks=self.masks,
            has_states=has_states and self.padding != "real",
            kv_tables=kv_tables,
            encodes_beside=encodes_beside,
            clock=self.shares.read,
        )
        self.shares.watch(self.scheduler)
        lag = int(speculates == "by a head")
        if speculates.startswith("by a ") and not self.has_windows:  # which needs one block table
            self.scheduler._batch._speculation = drafts = Generous(5, BLOCK_SIZE, lag)
            self.scheduler.on_step = lambda step, *_: drafts.observe(step, self.now)
        elif speculates:
            self.scheduler._batch._speculation = Oracle(5, next_token)
        self.masks.on_ready = self.scheduler.look_again
        self.has_tardy = False
        self.scheduler._outputs.expected_output_tokens = 2.0
        self.model = PretendedModel(BLOCK_SIZE, self.scheduler._facts.has_states, kv_tables)
        self.model.lag = lag
        self.executor = FailsLate(Wired(self.model)) if fails_late else Wired(self.model)
        self.overlap = Overlap(self.executor, AtOnce(), num_ahead)
        self.added: dict[str, Any] = {}
        self.num_parties = 0
        self.received: dict[str, list[int]] = {}
        self.scores: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.turns = Turns(
            by_length=self.mode in ("static", "dynamic"), share_levels=[level for level, _ in class_shares]
        )
        self.drains = drains

    @rule(
        prompts=st.lists(st.sampled_from(PROMPTS), min_size=1, max_size=4),
        max_tokens=st.sampled_from((1, 7, 18, 18)),
        num_choices=st.sampled_from((1, 1, 3)),
        together=st.booleans(),
        constrained=st.sampled_from((0, 0, 1, TARDY, ENDS)),
        scored=st.sampled_from((False, False, True)),
        level=st.sampled_from((0, 0, 1, 7)),
        timeout=st.sampled_from((math.inf, math.inf, 0.5, 30.0)),
    )
    def add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        num_choices: int,
        together: bool,
        constrained: int,
        scored: bool,
        level: int,
        timeout: float,
    ) -> None:
        self.num_parties += 1
        for prompt in prompts:
            hashes: list[bytes] = []
            for _ in range(num_choices):
                request = make_request(
                    f"r{len(self.added)}",
                    prompt,
                    max_tokens=max_tokens,
                    min_tokens=constrained,  # tells them apart, and changes nothing: no token ends an answer here
                    prompt_logprobs=0 if scored else None,
                    level=level,
                    arrival_time=self.now,
                    deadline=self.now + timeout,
                    prompt_hashes=hashes,
                    pictures=[PictureSpan(2, 6, b"seen"), PictureSpan(6, 7, b"also")] if len(prompt) > 8 else [],
                    party=f"p{self.num_parties}" if together else None,
                )
                self._add_one(request)

    def _add_one(self, request: EngineRequest) -> None:
        full = len(self.scheduler.waiting) >= MAX_QUEUED + len(self.scheduler._batch._tables.free_rows)
        try:
            self.scheduler.add_request(request)
        except Overloaded:
            assert full
            return
        assert not full
        self.added[request.request_id] = request
        self.received[request.request_id] = []
        self.scores[request.request_id] = []
        self.turns.came(self.scheduler.requests[request.request_id])

    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        if live := list(self.scheduler.requests):
            request = self.scheduler.requests[live[choice % len(live)]]
            self.scheduler.abort(request.request_id)
            assert request.num_blocks == 0, "an abort frees the blocks at once"

    @rule()
    def break_next(self) -> None:
        self.model.breaks = True

    @rule(choice=st.integers(0, 1000))
    def poison(self, choice: int) -> None:
        if live := list(self.scheduler.requests):
            self.model.poison.add(self.scheduler.requests[live[choice % len(live)]].sampling.seed)

    @rule(memory_tokens=st.sampled_from((BUDGET // 2, BUDGET // 3, BUDGET)))
    def give_memory(self, memory_tokens: int) -> None:
        self.model.memory_tokens = memory_tokens

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _constrain(self, request: EngineRequest) -> Constraint | None:
        assert request.params is not None
        if request.params.min_tokens < TARDY:
            return SumModThree() if request.params.min_tokens else None
        self.has_tardy = True
        delays = [0, 1, 2, 3, 5, 1][len(self.added) % 4 :]
        return TardySumModThree(self.masks, delays, 4 if request.params.min_tokens == ENDS else 1000)

    def step(self) -> None:
        scheduler = self.scheduler
        self.masks.tick()
        wakeup = scheduler.next_wakeup(self.now)
        plan = scheduler.schedule(self.now)
        self.turns.check(scheduler)
        steps = list(scheduler._batch._steps.values())
        if plan is not None:
            self._check_plan(plan)
        unwanted = sum(not work.is_wanted for step in steps[:1] for work in step.work)
        withdrawn = len(steps) - 1
        self.overlap.step(scheduler, plan)
        # With late errors, steps that will be withdrawn run too, and read what the failed step has not written.
        assert isinstance(self.executor, FailsLate) or not self.model.wrong
        if steps and steps[0].number not in scheduler._batch._steps:
            self.happened["discarded results"] += unwanted
            self.happened["withdrawn steps"] += withdrawn if not scheduler._batch._steps else 0
        outputs = scheduler.take_outputs()
        for output in outputs:
            self._take(output)
        due = wakeup is not None and wakeup <= self.now
        if self.has_tardy:
            assert due or not (steps or outputs), "a mask that becomes ready wakes the loop"
            self.happened["rows that sit out"] += any(work.sits_out for step in steps for work in step.work)
        else:
            assert due == bool(steps or outputs), "next_wakeup tells exactly when a step has something to do"
        self.happened["held rows"] += sum(request.finished is not None for request in scheduler.running)
        self.blocks_are_accounted_for()

    def _check_plan(self, plan: StepPlan) -> None:
        owners = {request.row: request for request in self.scheduler.running if request.row >= 0}
        requests = [owners[row] for row in plan.rows]
        self.happened["wanted images"] += len(plan.wanted_pictures)
        assert sum(plan.num_tokens) <= BUDGET
        assert len(set(plan.rows)) == len(plan.rows) <= self.scheduler._facts.max_num_seqs
        works = {work.request.row: work for work in self.scheduler._batch.step(plan.number).work}
        speculation = self.scheduler._batch._speculation
        num_logits_max = self.scheduler._facts.max_num_seqs + (speculation.max_tokens if speculation else 0)
        assert sum(plan.num_logits) <= num_logits_max, "there is memory for one of each row, and for drafts"
        num_drafts = [0] * plan.num_decodes + [len(drafts) for drafts in plan.drafts] + [0] * len(plan.rows)
        for request, computed, num_tokens, all_logits, drafts in zip(
            requests,
            plan.num_computed_tokens,
            plan.num_tokens,
            plan.num_logits,
            num_drafts[: len(requests)],
            strict=True,
        ):
            num_logits = works[request.row].num_logits
            assert all_logits == num_logits + works[request.row].num_scored
            num_known = len(request.token_ids) + request.num_awaited_tokens - num_logits + drafts
            assert request.num_computed_tokens <= computed < computed + num_tokens <= num_known
            assert computed + num_tokens == request.num_scheduled_tokens
            if (picture := request.next_picture) is not None and self.scheduler._batch._image_turns:
                assert computed + num_tokens <= picture.start, "it waits for its image"
            assert num_logits == (computed + num_tokens == num_known) + drafts
            assert request.finished is None or self.padding == "real", "only a padded batch steps what is finished"
        decodes, prefills = requests[: plan.num_decodes], requests[plan.num_decodes :]
        assert plan.num_tokens[: plan.num_decodes] == plan.num_logits[: plan.num_decodes] == [1] * len(decodes)
        if self.mode == "static" and any(request.num_output_tokens for request in decodes):
            assert not prefills, "all prompts before any decode"

    def _take(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name not in self.ended, "nothing comes after the last output"
        self.shares.check(output)
        self.received[name] += output.new_token_ids
        prompt = list(self.added[name].prompt_token_ids)
        self.scores[name] += [each.token_id for each in output.prompt_logprobs or ()]
        assert self.scores[name] == prompt[1 : len(self.scores[name]) + 1], "each token once and in order"
        if self.received[name] and self.added[name].params.prompt_logprobs is not None:
            assert len(self.scores[name]) == len(prompt) - 1, "all of them before the first token"
            self.happened["scored prompts"] += 1
        if output.finish_reason is not None:
            self.ended[name] = output.finish_reason
            self.happened[output.finish_reason] += 1
            self.happened["failed steps"] += output.message == step_runner.FAILED
            if self.scheduler._facts.has_states and output.message == step_runner.FAILED:
                assert self.model.failed_alone, "with states, only a request that fails alone ends"
        prefix = list(self.added[name].prompt_token_ids)
        constraint = SumModThree() if self.added[name].params.min_tokens else None
        for token_id in self.received[name]:
            allowed = constraint and constraint.build_mask()
            assert token_id == next_allowed(prefix, allowed), "the answer is the model's own, whatever the batch was"
            prefix.append(token_id)
            if constraint is not None:
                constraint.accept(token_id)
                self.happened["constrained tokens"] += 1
        if output.finish_reason == FinishReason.STOP_STRING:
            assert (len(self.received[name]), self.added[name].params.min_tokens) == (4, ENDS)
        if output.finish_reason == FinishReason.LENGTH:
            assert self.added[name].params.min_tokens != ENDS or len(self.received[name]) < 4
            assert len(self.received[name]) == self.added[name].params.max_tokens

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        scheduler.blocks.check([request.block_table + request.window.blocks for request in scheduler.running])
        admitted = [request for request in scheduler.running if request.row >= 0]
        tardy = [request.constraint for request in admitted if isinstance(request.constraint, TardySumModThree)]
        assert sorted(map(id, self.masks.opened)) == sorted(map(id, tardy)), "each row has a slot, and nothing else"
        assert all(r.finished and not r.num_blocks for r in scheduler.running if r not in admitted)
        rows = [request.row for request in admitted]
        assert sorted(rows + scheduler._batch._tables.free_rows) == list(range(scheduler._facts.max_num_seqs))
        running = names_of(scheduler.running)
        assert len(set(running)) == len(running)
        waiting = [request for name, request in scheduler.requests.items() if name not in running]
        assert len(waiting) == len(scheduler.waiting), "each request is in exactly one place"
        shares = scheduler._batch._tables._shares
        for limit, num_rows, num_blocks in zip(shares.limits, shares.num_rows, shares.num_blocks, strict=True):
            held = [request.num_blocks for request in admitted if request.level >= limit.level]
            assert (num_rows, num_blocks) == (len(held), sum(held))
            assert num_rows <= limit.num_rows
            self.happened["full shares"] += num_rows == limit.num_rows
        for request in waiting:
            assert not request.num_blocks
            assert request.row < 0
        for request in admitted:
            tables = scheduler._facts.kv_tables
            if tables.full:
                assert len(request.block_table) // tables.full * BLOCK_SIZE >= request.num_scheduled_tokens
            if tables.windowed:
                assert request.window.end * BLOCK_SIZE >= request.num_scheduled_tokens
                assert request.num_blocks <= tables.count_needed(MAX_MODEL_LEN, BLOCK_SIZE)
                self.happened["freed windows"] += request.window.first > 0
                self.happened["found windows"] += tables.first_kept(request.num_cached_tokens, BLOCK_SIZE) > 0
            works = [w for step in scheduler._batch._steps.values() for w in step.work if w.request is request]
            in_use = [work for work in works if work.is_wanted]
            scheduled, awaited = sum(work.num_tokens for work in in_use), sum(work.num_logits for work in in_use)
            assert request.num_scheduled_tokens == request.num_computed_tokens + scheduled
            assert request.num_awaited_tokens == awaited
        assert set(names_of(scheduler.waiting)) <= set(names_of(waiting)), "only those that fit are listed"
        if shares.limits:
            return
        waiting = list(scheduler.waiting)
        assert len(waiting) == len(scheduler.waiting), "without shares, all of them"
        if not scheduler._policy.joins:
            return  # a closed batch takes its own back before anybody else, wherever the queue has them
        for yields in {request.yields_seconds for request in waiting}:
            alike = [request for request in waiting if request.yields_seconds == yields]
            head = names_of(request for request in alike if request.was_admitted)
            assert head == names_of(alike)[: len(head)], "those who come back are before those who yield alike"
            assert head == sorted(head, key=self.turns.admitted.index), "and in their old order"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.model.memory_tokens = BUDGET
        self.finish(5_000)
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.num_blocks
        assert self.scheduler.next_wakeup(self.now) is None
        assert not self.scheduler._batch._steps
        self.shares.check_sums(self.scheduler)
        self.happened["unclaimed steps"] += self.shares.lost_seconds > 0
        stats = self.scheduler.stats()
        self.happened["padding"] += stats.padding_tokens
        self.happened["preemptions"] += stats.num_preemptions
        self.happened["accepted drafts"] += stats.num_accepted_tokens
        self.happened["rejected drafts"] += stats.num_draft_tokens - stats.num_accepted_tokens
        self.happened["prefix hits"] += stats.prefix_cache_hit_tokens
