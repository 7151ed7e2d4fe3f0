"""Decides which requests compute drafts of their next tokens in a step, and how many. START HERE for speculation.

A draft is one more token of the step. If the model samples the same token, the request has saved a step of its own, so
an accepted draft is worth what a step costs for each of its rows. A draft is computed if its probability to be
accepted, times this worth, is more than the cost of a token. Steps with many rows make a token worth little, and texts
that do not repeat themselves have no probable drafts: both then have none. `drafter` estimates the probability, and
`step_cost` fits both costs to the steps so far.

`running_batch` asks for drafts when it plans a step, and `core` reports how long the step took. Pure.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from conveyor_engine.scheduling.drafter import KEPT_OF_SERVICE, Drafter, Rates
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Reading, Step
from conveyor_engine.scheduling.step_cost import StepCost

READ_TOKENS: Final = 2048  # tokens of prompts that one step reads at most, which takes about a millisecond
STEPS_PER_FIT: Final = 64  # the first fits come sooner: after 1, 2, 4, ... steps
ENOUGH_DRAFTED: Final = 4  # steps with drafts after which the measured cost counts
# Until then a step is assumed to cost as much as this number of tokens and its rows together.
ASSUMED_TOKENS: Final = 8
STEPS_PER_TRIAL: Final = 1024  # after so many steps without drafts, their cost is measured again
MARGIN: Final = 1.25  # a draft must be worth its cost times this


class Speculation:
    """Proposes drafts while they are expected to pay."""

    def __init__(self, max_tokens: int, has_states: bool = False) -> None:
        """max_tokens: the most drafts of one request in a step. has_states: whether layers keep states for rows."""
        self.max_tokens = max_tokens
        self._tokens_of_draft = 1 + has_states  # with states, a step with rejected drafts is computed again
        self._of_service = Rates(KEPT_OF_SERVICE)
        self._cost = StepCost(smoothing=1.0)
        self._num_steps = 0
        self._num_drafted = 0  # steps with drafts since the last trial began
        self._last_drafted = 0  # number of the last of them

    def propose(
        self, requests: Collection[RequestState], room: int, num_tokens: int
    ) -> Iterator[tuple[RequestState, list[int]]]:
        """Yield the requests that should compute drafts, with these. Together they have at most `room` drafts.

        requests: those that decode in the step. A request whose tokens follow a constraint gets no drafts, and neither
        does one whose last token is not known yet. num_tokens: see `ModelDrafts`.
        """
        least_chance = self._find_least_chance(len(requests))
        drafters = {
            request: self._find_drafter(request)
            for request in requests
            if request.constraint is None and not request.num_awaited_tokens
        }
        _read(drafters)
        for request, drafter in drafters.items():
            most = min(self.max_tokens, room, request.max_total_tokens - len(request.token_ids) - 1)
            if drafts := drafter.draft(request.token_ids, most, least_chance):
                room -= len(drafts)
                yield request, drafts

    def list_readings(self, drafted: Sequence[tuple[RequestState, list[int]]]) -> list[Reading]:
        """Return what a draft model reads in the step: nothing, because there is none."""
        return []

    def _find_drafter(self, request: RequestState) -> Drafter:
        if request.drafter is None:
            request.drafter = Drafter(request.max_total_tokens, self._of_service, request.prediction)
        return request.drafter

    def observe(self, step: Step, ended: float, num_running: int = 0, num_waiting: int = 0) -> None:
        """Record how long a step took. Tokens of prompts count as drafts do."""
        self._num_steps += 1
        self._cost.observe(step.num_decoding, step.num_prompt_tokens, ended - step.planned_at)
        if step.num_drafts:
            self._num_drafted += 1
            self._last_drafted = self._num_steps
        elif self._num_steps - self._last_drafted > STEPS_PER_TRIAL:
            self._num_drafted = 0
        if self._num_steps % STEPS_PER_FIT == 0 or self._num_steps & (self._num_steps - 1) == 0:
            self._cost.fit()

    def _find_least_chance(self, num_rows: int) -> float:
        """Return the probability from which on a draft pays in a step of so many rows."""
        cost = self._cost.coefficients
        if cost is None or self._num_drafted < ENOUGH_DRAFTED:
            return num_rows / (num_rows + ASSUMED_TOKENS)
        worth = cost.seconds(num_rows, 0) / num_rows
        return MARGIN * self._tokens_of_draft * cost.per_token / worth if worth else 1.0


def _read(drafters: Mapping[RequestState, Drafter]) -> None:
    """Read new tokens, the fewest first, so that a long text delays the drafts of no other request."""
    most = READ_TOKENS
    for request, drafter in sorted(drafters.items(), key=lambda item: item[1].count_unread(len(item[0].token_ids))):
        most -= drafter.read(request.token_ids, request.num_prompt_tokens, most)
