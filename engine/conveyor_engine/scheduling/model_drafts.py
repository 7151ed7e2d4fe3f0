"""Decides which requests a draft model guesses tokens for, how many, and what it reads before. Pure.

Used in place of `speculation` if there is a draft model, with the same rule: a draft is computed if its probability to
be accepted, times what it saves, is more than its cost. There are three differences, because a guess costs time and
says only afterwards whether it was right.

- The guesses of a step are forwards of the draft model, one after another, which all requests with drafts share.
- The draft model reads a request's tokens once the rest of the answer is likely to save more time than that takes.
- While no drafts pay, one draft is tried now and then, which takes `TRIED_SHARE` of the time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from conveyor_engine.scheduling.drafter import KEPT_OF_SERVICE, DraftState, Rates, find_chance, kind_of
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.speculation import ASSUMED_TOKENS, ENOUGH_DRAFTED, MARGIN, STEPS_PER_FIT
from conveyor_engine.scheduling.step import Reading, Step
from conveyor_engine.scheduling.step_cost import StepCost
from conveyor_engine.wire.step import READ_TOKENS

TRIED_SHARE: Final = 0.01
PAUSE_STEPS: Final = 8  # so many steps do not ask again after one without drafts, because the answer takes time too
_MOST_CREDIT_SECONDS: Final = 10.0  # for trials, or what the last one that was considered costs


class Prices(NamedTuple):
    """Seconds in a step of so many rows."""

    worth: float  # what an accepted draft saves
    per_draft: float
    per_forward: float  # of the draft model
    per_read: float  # for each token that it reads
    are_known: bool = True

    @property
    def least_chance(self) -> float:
        """The probability above which a draft is worth more than it costs beside a forward."""
        return MARGIN * self.per_draft / self.worth if self.worth else 1.0


class ModelDrafts:
    """Lets requests have drafts while they are expected to pay."""

    def __init__(self, max_tokens: int, block_size: int, lag: int = 0, has_states: bool = False) -> None:
        """max_tokens, has_states: see `Speculation`. lag: 1 for a head (`ModelFacts.draft_lag`).

        A head computes at each position what follows the token after it. So it has one position less than tokens, and
        a position's keys depend on the next token. What it computes for its own guesses is computed again.
        """
        self.max_tokens, self._lag, self._tokens_of_draft = max_tokens, lag, 1 + has_states
        self._block_size = block_size
        self._rates = Rates(KEPT_OF_SERVICE)
        self._cost, self._draft_cost = StepCost(smoothing=1.0), StepCost(smoothing=1.0)
        self._num_steps = self._num_drafting = 0  # steps, and those with forwards of the draft model
        self._pause = 0
        self._credit, self._is_trial = 0.0, False  # seconds that trials may take, and whether this step is one
        self._most_credit = _MOST_CREDIT_SECONDS
        self._readings: list[Reading] = []  # of the step that is planned
        self._held: dict[int, bytes] = {}  # blocks whose tokens the draft model has read, each with its prefix's hash

    def propose(
        self, requests: Collection[RequestState], room: int, num_tokens: int
    ) -> Iterator[tuple[RequestState, list[int]]]:
        """Yield the requests that should compute drafts, each with a zero for each draft. All have at most `room`.

        requests: those that decode in the step. Requests with a constraint or with pictures get no drafts.
        num_tokens: further tokens for which the step has time. The draft model reads no more.
        """
        self._readings, self._is_trial = [], False
        if self._pause or room < 1:
            self._pause = max(0, self._pause - 1)
            return
        states = {each: self._find_state(each) for each in requests if self._may_have_drafts(each)}
        states = {each: state for each, state in states.items() if _count_unread(each) > 0}
        if not states:
            return
        prices = self._find_prices(len(requests))
        numbers = self._choose(states, prices) or self._try_one(states, prices)
        self._pause = 0 if numbers else PAUSE_STEPS
        left = min(READ_TOKENS, num_tokens)
        for request in sorted(numbers, key=_count_unread):
            first, unread = states[request].num_read, _count_unread(request)
            if not (num_read := min(unread, left)):
                break
            number = min(numbers[request], room, request.max_total_tokens - len(request.token_ids) - 1)
            number = number if num_read == unread else 0
            if num_read < unread or number > 0:
                left -= num_read
                self._readings.append(Reading(request, request.admission, first, num_read, number))
            if number > 0:
                room -= number
                yield request, [0] * number

    def list_readings(self, drafted: Sequence[tuple[RequestState, list[int]]]) -> list[Reading]:
        """Return what the draft model reads in the step. drafted: the requests that got room for their drafts."""
        have_room = {request.row for request, _ in drafted}
        found = [each for each in self._readings if not each.num_drafts or each.request.row in have_room]
        for each in found:
            self._forget(each)
        return sorted(found, key=lambda each: each.num_tokens > 1)  # as in a plan, rows with one token come first

    def observe(self, step: Step, ended: float, num_running: int = 0, num_waiting: int = 0) -> None:
        """Record how long a step and the draft model took, and which of its guesses were right."""
        seconds, spent = ended - step.planned_at, step.draft_seconds
        self._num_steps += 1
        self._cost.observe(step.num_decoding, step.num_prompt_tokens, seconds - spent)
        if _is_fit_due(self._num_steps):
            self._cost.fit()
        if not step.readings:
            if step.num_decoding:
                self._credit = min(self._most_credit, self._credit + TRIED_SHARE * seconds)
            return
        for num_rows, num_tokens, of_forward in step.forwards:
            self._draft_cost.observe(num_rows, num_tokens - num_rows, of_forward)
        self._num_drafting += 1
        if _is_fit_due(self._num_drafting):
            self._draft_cost.fit()
        if self._is_trial:
            per_token = 0.0 if self._cost.coefficients is None else self._cost.coefficients.per_token
            self._credit -= spent + step.num_drafts * per_token
        for reading in step.readings:
            self._learn(reading)

    def _may_have_drafts(self, request: RequestState) -> bool:
        if self._lag and request.num_sent_blocks < 0:
            return False  # admitted in this step, which may only now compute hidden states of blocks that it shares
        return request.constraint is None and not request.num_awaited_tokens and not request.pictures

    # --- what the draft model has read ---

    def _find_state(self, request: RequestState) -> DraftState:
        state = request.draft_state
        if state is None:
            state = request.draft_state = DraftState(self._lag)
        if state.admission != request.admission:
            state.admission, state.num_read = request.admission, self._count_held(request)
        state.num_read = min(state.num_read, request.num_computed_tokens)  # rejected drafts are read again
        return state

    def _count_held(self, request: RequestState) -> int:
        """Return how many of its first tokens the draft model has read for other requests with the same prefix."""
        number = 0
        for block, prefix in zip(request.block_table, request.block_hashes, strict=False):
            if self._held.get(block) != prefix:
                break
            number += self._block_size
        return max(0, number - self._lag)

    def _forget(self, reading: Reading) -> None:
        """Forget what the blocks held that the draft model will write."""
        begin, end = reading.first // self._block_size, reading.end + reading.num_drafts
        for block in reading.request.block_table[begin : -(-end // self._block_size)]:
            self._held.pop(block, None)

    def _learn(self, reading: Reading) -> None:
        """Record what the draft model has read, and which of its guesses were right."""
        request, state = reading.request, reading.request.draft_state
        assert state is not None
        num_right = max(0, min(reading.num_drafts, len(request.token_ids) - self._lag - reading.end - 1))
        for _ in range(num_right):
            self._judge(state, True)
        if num_right < reading.num_drafts and request.finished is None:
            self._judge(state, False)
        if request.admission != reading.admission:
            return
        num_read_drafts = 0 if self._lag else min(num_right, max(0, reading.num_drafts - 1))
        state.num_read = reading.end + num_read_drafts
        begin, end = reading.first // self._block_size, reading.end // self._block_size
        self._held.update(zip(request.block_table[begin:end], request.block_hashes[begin:end], strict=False))

    def _judge(self, state: DraftState, is_right: bool) -> None:
        for rates in (state.rates, self._rates):
            rates.add(kind_of(state.num_right), is_right)
        state.num_right = state.num_right + 1 if is_right else 0

    # --- what pays ---

    def _find_prices(self, num_rows: int) -> Prices:
        """Return the prices. Until costs are known, they are assumed as in `speculation`, and reading costs nothing."""
        cost, of_draft = self._cost.coefficients, self._draft_cost.coefficients
        if cost is None or of_draft is None or self._num_drafting < ENOUGH_DRAFTED:
            return Prices(1 / num_rows, 1 / (num_rows + ASSUMED_TOKENS) / MARGIN, 0.0, 0.0, are_known=False)
        worth = cost.seconds(num_rows, 0) / num_rows
        per_draft = self._tokens_of_draft * cost.per_token + of_draft.per_row
        return Prices(worth, per_draft, of_draft.base, of_draft.per_token)

    def _choose(self, states: Mapping[RequestState, DraftState], prices: Prices) -> dict[RequestState, int]:
        """Return the requests for which drafts pay, with their numbers of drafts."""
        chances = {request: self._list_chances(state, prices.least_chance) for request, state in states.items()}
        numbers = _find_numbers(chances, prices)
        late = [each for each in numbers if _count_unread(each) > self.max_tokens + 1]
        dropped = {each for each in late if not _pays_to_read(each, chances[each], numbers, prices)}
        if not dropped:
            return numbers
        return _find_numbers({each: of for each, of in chances.items() if each not in dropped}, prices)

    def _list_chances(self, state: DraftState, least: float) -> list[float]:
        """Return the probabilities of its first draft, its second, and so on to be accepted, if more than `least`."""
        chance, chances = 1.0, list[float]()
        while len(chances) < self.max_tokens:
            chance *= find_chance(kind_of(state.num_right + len(chances)), state.rates, self._rates)
            if chance <= least:
                break
            chances.append(chance)
        return chances

    def _try_one(self, states: Mapping[RequestState, DraftState], prices: Prices) -> dict[RequestState, int]:
        """Return the request whose draft costs least, if the time since the last trials pays for it."""
        request = min(states, key=_count_unread)
        unread = _count_unread(request) - 1
        cost = unread * prices.per_read + (1 + unread // READ_TOKENS) * prices.per_forward + prices.per_draft
        self._most_credit = max(_MOST_CREDIT_SECONDS, cost)
        self._is_trial = not prices.are_known or cost <= self._credit
        return {request: 1} if self._is_trial else {}


def _count_unread(request: RequestState) -> int:
    """Return how many tokens the draft model would read before it guesses."""
    state = request.draft_state
    assert state is not None
    return len(request.token_ids) - state.lag - state.num_read


def _find_numbers(chances: Mapping[RequestState, Sequence[float]], prices: Prices) -> dict[RequestState, int]:
    """Return the numbers of drafts that pay together. A further forward of the draft model must pay for all of them."""
    numbers, going = dict[RequestState, int](), list(chances)
    for index in range(max(map(len, chances.values()), default=0)):
        going = [each for each in going if index < len(chances[each])]
        saved = prices.worth * sum(chances[each][index] for each in going)
        if saved <= MARGIN * (prices.per_forward + len(going) * prices.per_draft):
            break
        numbers |= dict.fromkeys(going, index + 1)
    return numbers


def _pays_to_read(
    request: RequestState, chances: Sequence[float], numbers: Mapping[RequestState, int], prices: Prices
) -> bool:
    """Return whether drafts are expected to save more until the request ends than reading its tokens costs."""
    accepted = chances[: numbers[request]]
    of_draft = prices.per_draft + prices.per_forward / len(numbers)
    saved_by_step = sum(accepted) * prices.worth - len(accepted) * of_draft
    expected = max(request.expected_total_tokens - len(request.token_ids), request.num_output_tokens)
    num_left = min(expected, request.max_total_tokens - len(request.token_ids))
    return saved_by_step * num_left / (1 + sum(accepted)) > MARGIN * prices.per_read * _count_unread(request)


def _is_fit_due(number: int) -> bool:
    return number % STEPS_PER_FIT == 0 or number & (number - 1) == 0
