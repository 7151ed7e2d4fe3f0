"""A fake model that notices wrong KV slots and states, and drafts of what it will say. Without torch."""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

import msgspec
from tests.engine.pretended_constraints import next_allowed, next_token

from conveyor_engine.loop.executor import Read, Sample
from conveyor_engine.scheduling.model_drafts import ModelDrafts, Prices
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.speculation import Speculation
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables
from conveyor_engine.wire.request import TokenLogprobs
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

T = TypeVar("T")


class PretendedModel:
    """An executor that keeps for each KV slot whose key it has. Attention to another request's key is an error.

    In windowed tables it reads the keys that a step's tokens see. It also pretends a draft model with slots of its own.
    With a lag, the draft model also reads hidden states, which have the slots of keys.

    It knows requests only from its plans. A step with a row whose seed is in `poison`, or with more tokens than
    `memory_tokens`, raises, with half of its keys written.

    If it has states, each row also has a state of all tokens that it has computed, which starts anew with a first
    token. The next token depends on it, so it is wrong after a token that was computed twice or by another request.
    After a step with rejected drafts, it is as before the step.

    lag: that of its draft model, see `ModelDrafts`.
    """

    lag = 0

    def __init__(self, block_size: int, has_states: bool = False, tables: KVTables = ONE_TABLE) -> None:
        self._block_size = block_size
        self._tables = tables
        self._states: dict[int, list[int]] | None = {} if has_states else None
        self._slots: dict[int, int] = {}
        self._draft_slots: dict[int, int] = {}
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
        self._record(lambda: self._apply(plan))
        guessed = self._record(lambda: self._guess(plan)) if plan.readings else plan
        logits = self._record(lambda: self._compute(guessed))
        return lambda masks: self._record(lambda: self._choose(guessed, logits, masks))

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

    def _guess(self, plan: StepPlan) -> StepPlan:
        """Read what the plan says, as a draft model does, and put its guesses in the place of the zeros."""
        wanted = dict(zip(plan.rows[plan.num_decodes :], map(len, plan.drafts), strict=False))
        drafts: dict[int, list[int]] = {}
        for row, first, number in plan.readings:
            end = first + number + self.lag
            known = self._token_ids[row][:end]
            assert len(known) == end, "the draft model reads known tokens"
            for position in range(first, first + number) if self.lag else ():
                held = self._slots.get(self._slot(row, 0, position))
                assert held == self._content(row, 0, position), f"the head reads a foreign hidden state at {position}"
            drafts[row] = []
            for _ in range(wanted.get(row, 0)):
                drafts[row].append(next_token([*known, *drafts[row]]) if (len(known) + len(drafts[row])) % 4 else 3)
            if drafts[row]:
                self._token_ids[row][end:] = drafts[row]
            for position in range(first, first + number + max(0, len(drafts[row]) - 1)):
                self._draft_slots[self._slot(row, 0, position)] = self._content(row, 0, position)
        for row, first, number in plan.readings:
            for position in range(first + number + max(0, len(drafts[row]) - 1)):
                held = self._draft_slots.get(self._slot(row, 0, position))
                assert held == self._content(row, 0, position), f"the draft model has a foreign key at {position}"
        return msgspec.structs.replace(plan, drafts=[drafts[row] for row in wanted])

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

    def _sample(self, row: int, length: int, allowed: bytes | None, num_later: int = 0) -> list[int]:
        """num_later: tokens that the step computes in the row after these."""
        token_ids = self._token_ids[row][:length]
        assert len(token_ids) == length, "all its tokens are known"
        self._token_ids[row] = token_ids
        known = token_ids
        if self._states is not None:
            known = self._states[row][: len(self._states[row]) - num_later]
        token_id = next_allowed(known, allowed)
        if self.breaks:
            self.breaks, token_id = False, -1
        token_ids.append(max(0, token_id))
        return [token_id]

    def _sample_drafted(self, row: int, length: int, drafts: list[int]) -> list[int]:
        """Sample the token after the row's first `length` tokens, and one more for each draft that is accepted."""
        sampled: list[int] = []
        while sampled == drafts[: len(sampled)] and len(sampled) <= len(drafts):
            sampled += self._sample(row, length + len(sampled), None, len(drafts) - len(sampled))
        if self._states is not None and len(sampled) <= len(drafts):
            del self._states[row][-len(drafts) - 1 :]
        return sampled

    def _slot(self, row: int, table: int, position: int) -> int:
        block = self._block_ids[row][table, position // self._block_size]
        return block * self._block_size + position % self._block_size

    def _content(self, row: int, table: int, position: int) -> int:
        known = self._token_ids[row][: position + 1]
        return zlib.crc32(repr(known).encode(), table) if len(known) > position else -1


class Generous(ModelDrafts):
    """Lets the draft model guess for all requests in every step, whatever it costs."""

    def _find_prices(self, num_rows: int) -> Prices:
        return Prices(worth=1.0, per_draft=0.0, per_forward=0.0, per_read=0.0)


class Oracle(Speculation):
    """Drafts what the model will say, except that some of the tokens are wrong."""

    def __init__(self, max_tokens: int, foretell: Callable[[list[int]], int]) -> None:
        """foretell: returns the model's token after these."""
        super().__init__(max_tokens)
        self._foretell = foretell

    def propose(
        self, requests: Collection[RequestState], room: int, num_tokens: int
    ) -> Iterator[tuple[RequestState, list[int]]]:
        for request in requests:
            token_ids = request.token_ids.tolist()
            most = min(self.max_tokens, room, request.max_total_tokens - len(token_ids) - 1)
            if request.constraint is not None or (number := min(most, len(token_ids) % 6)) < 1:
                continue
            for _ in range(number):
                token_ids.append(self._foretell(token_ids) if len(token_ids) % 4 else 3)
            room -= number
            yield request, token_ids[-number:]
