"""Builds requests, facts and a fake model, for tests of the parts of the engine that do not use torch."""

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop.executor import Read, Sample
from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.constraint import Constraint, MaskSource
from conveyor_engine.scheduling.filling import BatchLimits
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.speculation import Speculation
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_engine.wire.request import EngineRequest, ModelFacts, SamplingParams, TokenLogprobs
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

T = TypeVar("T")
VOCAB_SIZE = 1000
EOS = 2


def make_request(request_id: str = "a", prompt: int | Sequence[int] = 4, **params: Any) -> EngineRequest:
    """Make a request. prompt: tokens, or their number; others: fields such as party and arrival_time."""
    names = (
        "party",
        "arrival_time",
        "prompt_hashes",
        "cache_salt",
        "level",
        "deadline",
        "pictures",
        "payload",
        "adapter",
    )
    own = {name: params.pop(name) for name in names if name in params}
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    params.setdefault("max_tokens", 4)
    return EngineRequest(request_id=request_id, prompt_token_ids=tokens, params=SamplingParams(**params), **own)


def make_state(prompt: int | list[int] = 4, request_id: str = "a", **params: Any) -> RequestState:
    return RequestState(make_request(request_id, prompt, **params), (EOS,))


def make_limits(num_rows: int, cost: float = math.inf, padded: bool = False) -> BatchLimits:
    return BatchLimits(Limits(num_rows, prompt_tokens=1000), cost, padded)


def make_facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "task": "generate",
        "max_model_len": 64,
        "vocab_size": VOCAB_SIZE,
        "eos_token_ids": (EOS,),
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "none",
        "num_kv_blocks": 32,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    return ModelFacts(**(values | changes))


def make_scheduler(
    mode: str = "continuous",
    *,
    padding: str | None = None,
    tokenizer: Tokenizer | None = None,
    constrain: Callable[[EngineRequest], Constraint | None] | None = None,
    masks: MaskSource | None = None,
    slots: AdapterSlots | None = None,
    clock: Callable[[], float] = float,
    **changes: Any,
) -> Scheduler:
    """Make a scheduler. changes: fields of the configuration or of the facts. By default, Static batches are packed."""
    own = {name: changes.pop(name) for name in list(changes) if name in ModelFacts.__struct_fields__}
    padding = padding or ("none" if mode == "static" else None)
    config = EngineConfig(model="none", batching_mode=mode, padding=padding, **changes)  # type: ignore[arg-type]
    return Scheduler(config, make_facts(**own), tokenizer, constrain, masks=masks, slots=slots, clock=clock)


def next_token(token_ids: list[int]) -> int:
    """Return the fake model's next token. It depends on all of these tokens and is never EOS."""
    return 10 + zlib.crc32(repr(token_ids).encode()) % (VOCAB_SIZE - 10)


class SumModThree(Constraint):
    """A constraint: the next token and the sum of the answer's earlier tokens are equal modulo three."""

    num_tokens = VOCAB_SIZE

    def __init__(self) -> None:
        self._sum = 0

    def accept(self, token_id: int) -> None:
        assert is_allowed(self.build_mask(), token_id), "only an allowed token is given"
        self._sum += token_id

    @property
    def is_complete(self) -> bool:
        return False

    def build_mask(self) -> bytes:
        bits = sum(1 << token_id for token_id in range(self._sum % 3, self.num_tokens, 3))
        return bits.to_bytes(-(-self.num_tokens // 8), "little")


class PretendedMasks:
    """Builds masks as slowly as its constraints want. Time passes with `tick`, and a little with `wait`."""

    def __init__(self) -> None:
        self.opened: list[TardySumModThree] = []
        self.on_ready: Callable[[], None] = lambda: None
        self._loop_sleeps = False

    def tick(self) -> None:
        """Let time pass."""
        self._pass([each for each in self.opened if each.delay])

    def flush(self) -> None:
        pass

    def wait(self, constraints: Collection[Constraint], seconds: float) -> None:
        self._pass([each for each in self.opened if each in constraints and each.delay == 1])

    def sleep(self) -> None:
        self._loop_sleeps = True

    def _pass(self, waiting: list["TardySumModThree"]) -> None:
        for each in waiting:
            each.delay -= 1
        if self._loop_sleeps and any(not each.delay for each in waiting):
            self._loop_sleeps = False
            self.on_ready()


class TardySumModThree(SumModThree):
    """The same, but the mask after a token is ready only after some time, and the answer ends after some tokens."""

    def __init__(self, masks: PretendedMasks, delays: list[int], ends_after: int) -> None:
        super().__init__()
        self._masks, self._delays, self._ends_after = masks, delays, ends_after
        self._num_tokens = 0
        self.delay = delays[0]

    def open(self) -> None:
        self._start()
        self._masks.opened.append(self)

    def close(self) -> None:
        self._masks.opened.remove(self)

    def accept(self, token_id: int) -> None:
        assert is_allowed(SumModThree.build_mask(self), token_id), "only an allowed token is given"
        self._sum += token_id
        self._num_tokens += 1
        self._start()

    def _start(self) -> None:
        self.delay = self._delays[self._num_tokens % len(self._delays)]

    @property
    def is_ready(self) -> bool:
        return not self.delay

    @property
    def is_complete(self) -> bool:
        assert self.is_ready
        return self._num_tokens >= self._ends_after

    def build_mask(self) -> bytes:
        assert self.is_ready
        return super().build_mask()


def is_allowed(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def next_allowed(token_ids: list[int], mask: bytes | None) -> int:
    """Return `next_token`, or the first token after it that the mask allows."""
    token_id = next_token(token_ids)
    while mask is not None and not is_allowed(mask, token_id):
        token_id = 10 + (token_id - 9) % (VOCAB_SIZE - 10)
    return token_id


class PretendedModel:
    """An executor that keeps for each KV slot whose key it has. Attention to another request's key is an error.

    In windowed tables it reads the keys that a step's tokens see.

    It knows requests only from its plans. A step with a row whose seed is in `poison`, or with more tokens than
    `memory_tokens`, raises, with half of its keys written.

    If it has states, each row also has a state of all tokens that it has computed, which starts anew with a first
    token. The next token depends on it, so it is wrong after a token that was computed twice or by another request.
    """

    def __init__(self, block_size: int, has_states: bool = False, tables: KVTables = ONE_TABLE) -> None:
        self._block_size = block_size
        self._tables = tables
        self._states: dict[int, list[int]] | None = {} if has_states else None
        self._slots: dict[int, int] = {}
        self._token_ids: dict[int, list[int]] = {}  # by row, like the rest of its state
        self._block_ids: dict[int, dict[tuple[int, int], int]] = {}  # by row, then by table and index
        self._seeds: dict[int, int] = {}
        self._num_prompt_tokens: dict[int, int] = {}
        self.breaks = False  # the next row's logits are not finite
        self.poison: set[int] = set()
        self.memory_tokens = 10**9
        self.failed_alone = False  # whether a step of a single row has raised
        self.wrong: list[Exception] = []

    def free_memory(self) -> None:
        pass

    def begin(self, plan: StepPlan) -> Sample:
        logits = self._record(lambda: self._compute(plan))
        return lambda masks: self._record(lambda: self._choose(plan, logits, masks))

    def _record(self, call: Callable[[], T]) -> T:
        """Record what is wrong with a plan: the loop takes any error for a failed step, and runs it again."""
        try:
            return call()
        except (AssertionError, LookupError) as error:
            self.wrong.append(error)
            raise

    def _choose(self, plan: StepPlan, logits: list[tuple[int, int, int]], masks: Sequence[RowMask]) -> Read:
        allowed = {mask.row: mask.allowed for mask in masks}
        scores = [self._score(row, length, count) for row, length, count in logits]
        sampled = [
            self._sample(row, length, allowed.get(row)) if len(scored) < count else []
            for (row, length, count), scored in zip(logits, scores, strict=True)
        ]
        for index, drafts in enumerate(plan.drafts, start=plan.num_decodes):
            row, length, _ = logits[index]
            sampled[index] = self._sample_drafted(row, length - len(drafts), drafts)
        encoded = [each.digest for each in plan.wanted_pictures[: plan.number % 2]]
        scored = [each or None for each in scores] if any(scores) else None
        result = StepResult(plan.number, sampled, scored, encoded=encoded)
        return lambda: result

    def _score(self, row: int, length: int, num_logits: int) -> list[TokenLogprobs]:
        """Return the prompt tokens that follow one of the last `num_logits` of the row's `length` tokens."""
        places = range(length - num_logits + 1, min(length + 1, self._num_prompt_tokens[row]))
        return [TokenLogprobs.of(self._token_ids[row][place], -float(place), [], []) for place in places]

    def _compute(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Return the rows with logits: each with its number of tokens, and after how many of them it has logits."""
        self._apply(plan)
        work = list(zip(plan.rows, plan.num_computed_tokens, plan.num_tokens, strict=True))
        if self.poison.intersection(self._seeds[row] for row in plan.rows) or sum(plan.num_tokens) > self.memory_tokens:
            for row, computed, num_tokens in work[::2]:
                self._write(row, computed, num_tokens, fails=True)
                self._change_state(row, computed, num_tokens)
            self.failed_alone |= len(work) == 1
            raise RuntimeError("out of memory")
        for row, computed, num_tokens in work:  # all are written before any is read
            self._write(row, computed, num_tokens)
        for row, computed, num_tokens in work:
            self._change_state(row, computed, num_tokens)
            self._read(row, computed, num_tokens)
        lengths = [(row, computed + num_tokens) for row, computed, num_tokens in work]
        return [(*length, count) for length, count in zip(lengths, plan.num_logits, strict=True) if count]

    def _write(self, row: int, computed: int, num_tokens: int, *, fails: bool = False) -> None:
        for table in range(self._tables.number):
            for position in range(computed, computed + num_tokens):
                self._slots[self._slot(row, table, position)] = -1 if fails else self._content(row, table, position)

    def _read(self, row: int, computed: int, num_tokens: int) -> None:
        for table in range(self._tables.number):
            first = 0 if table < self._tables.full else max(0, computed - self._tables.window + 1)
            for position in range(first, computed + num_tokens):
                held = self._slots.get(self._slot(row, table, position))
                assert held == self._content(row, table, position), f"row {row} reads a foreign key at {position}"

    def _change_state(self, row: int, computed: int, num_tokens: int) -> None:
        if self._states is not None:
            state = self._states[row] if computed else []
            self._states[row] = state + self._token_ids[row][computed : computed + num_tokens]

    def _apply(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            self._token_ids[admitted.row] = list(admitted.token_ids)
            self._block_ids[admitted.row] = {}
            self._set_blocks(admitted.row, 0, admitted.block_ids, range(self._tables.full))
            windowed = range(self._tables.full, self._tables.number)
            self._set_blocks(admitted.row, admitted.window_first, admitted.window_blocks, windowed)
            self._seeds[admitted.row] = admitted.sampling.seed
            self._num_prompt_tokens[admitted.row] = admitted.sampling.num_prompt_tokens
        for row, block_ids in plan.new_blocks:
            first = sum(table == 0 for table, _ in self._block_ids[row])
            self._set_blocks(row, first, block_ids, range(self._tables.full))
        for row, first, block_ids in plan.new_window_blocks:
            self._set_blocks(row, first, block_ids, range(self._tables.full, self._tables.number))
        drafted = slice(plan.num_decodes, plan.num_decodes + len(plan.drafts))
        for row, computed, drafts in zip(
            plan.rows[drafted], plan.num_computed_tokens[drafted], plan.drafts, strict=True
        ):
            self._token_ids[row][computed + 1 :] = drafts

    def _set_blocks(self, row: int, first: int, block_ids: list[int], tables: range) -> None:
        places = [(table, first + index) for index in range(len(block_ids) // max(1, len(tables))) for table in tables]
        self._block_ids[row] |= zip(places, block_ids, strict=True)

    def _sample(self, row: int, length: int, allowed: bytes | None) -> list[int]:
        token_ids = self._token_ids[row][:length]
        assert len(token_ids) == length, "all its tokens are known"
        self._token_ids[row] = token_ids
        token_id = next_allowed(token_ids if self._states is None else self._states[row], allowed)
        if self.breaks:
            self.breaks, token_id = False, -1
        token_ids.append(max(0, token_id))
        return [token_id]

    def _sample_drafted(self, row: int, length: int, drafts: list[int]) -> list[int]:
        """Sample the token after the row's first `length` tokens, and one more for each draft that is accepted."""
        sampled: list[int] = []
        while sampled == drafts[: len(sampled)] and len(sampled) <= len(drafts):
            sampled += self._sample(row, length + len(sampled), None)
        return sampled

    def _slot(self, row: int, table: int, position: int) -> int:
        block = self._block_ids[row][table, position // self._block_size]
        return block * self._block_size + position % self._block_size

    def _content(self, row: int, table: int, position: int) -> int:
        known = self._token_ids[row][: position + 1]
        return zlib.crc32(repr(known).encode(), table) if len(known) > position else -1


class Wired:
    """Runs an executor as if it were in another process: every plan and every result is encoded as msgpack."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def begin(self, plan: StepPlan) -> Sample:
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        begun = self._executor.begin(arrived)

        def sample(masks: Sequence[RowMask]) -> Read:
            result = begun(msgspec.msgpack.decode(msgspec.msgpack.encode(masks), type=list[RowMask]))
            return lambda: msgspec.msgpack.decode(msgspec.msgpack.encode(result()), type=StepResult)

        return sample


class Oracle(Speculation):
    """Drafts what the model will say, except that some of the tokens are wrong."""

    def __init__(self, max_tokens: int, foretell: Callable[[list[int]], int]) -> None:
        """foretell: returns the model's token after these."""
        super().__init__(max_tokens)
        self._foretell = foretell

    def propose(self, requests: Collection[RequestState], room: int) -> Iterator[tuple[RequestState, list[int]]]:
        for request in requests:
            token_ids = request.token_ids.tolist()
            most = min(self.max_tokens, room, request.max_total_tokens - len(token_ids) - 1)
            if request.constraint is not None or (number := min(most, len(token_ids) % 6)) < 1:
                continue
            for _ in range(number):
                token_ids.append(self._foretell(token_ids) if len(token_ids) % 4 else 3)
            room -= number
            yield request, token_ids[-number:]


class AtOnce(Pool):
    """An executor that runs each step before it returns, like a device that is faster than its caller."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FailsLate:
    """An executor that raises only when a result is read, as a GPU does."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.num_errors = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def begin(self, plan: StepPlan) -> Sample:
        begun = AtOnce().submit(self._executor.begin, plan)

        def sample(masks: Sequence[RowMask]) -> Read:
            sampled = begun if begun.exception() else AtOnce().submit(begun.result(), masks)

            def read() -> StepResult:
                self.num_errors += sampled.exception() is not None
                return sampled.result()()

            return read

        return sample


def names_of(requests: Iterable[RequestState]) -> list[str]:
    return [request.request_id for request in requests]


def result_of(plan: StepPlan, token_id: int = 7) -> StepResult:
    """Return a result in which each row that samples gets `token_id`."""
    return StepResult(plan.number, [[token_id]] * sum(plan.num_logits))


def run_step(scheduler: Scheduler, now: float = 0.0, token_id: int = 7) -> dict[str, Any]:
    """Run one step in which each row that samples gets `token_id`. Returns the outputs by request id."""
    plan = scheduler.schedule(now)
    if plan is not None:
        scheduler.update(result_of(plan, token_id))
    return {output.request_id: output for output in scheduler.take_outputs()}


def work_of(scheduler: Scheduler, plan: StepPlan | None) -> dict[str, int]:
    """Return how many tokens of each request the plan computes, in its order."""
    assert plan is not None
    names = {request.row: request.request_id for request in scheduler.running}
    return {names[row]: num_tokens for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True)}


def run_all(scheduler: Scheduler, now: float = 0.0) -> list[dict[str, Any]]:
    """Run steps until no request is left."""
    steps = []
    while scheduler.has_unfinished():
        steps.append(run_step(scheduler, now))
        assert len(steps) < 10_000, "the scheduler does not come to an end"
    return steps
