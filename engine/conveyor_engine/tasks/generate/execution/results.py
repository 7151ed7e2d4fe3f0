"""Copies a step's sampled tokens to the host, puts them in the order of the rows, and checks drafts. Used by `runner`.

A draft is accepted if the token that was sampled in its place is the same. This is rejection sampling, as for drafts
without a distribution of their own: a draft is accepted with the probability that the model gives it, and otherwise the
token is distributed as the model's tokens other than the draft. Since a token's random number depends only on the seed
and the position, a request even gets the tokens that it would get without drafts.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat

from conveyor_engine.execution.sampling.logprobs import Logprobs
from conveyor_engine.execution.sampling.sampler import Sampled
from conveyor_engine.execution.states import States
from conveyor_engine.execution.transfer import HostCopy
from conveyor_engine.wire.request import TokenLogprobs
from conveyor_engine.wire.step import StepPlan, StepResult


def start_copy(plan: StepPlan, sampled: Sampled, states: States | None = None) -> Callable[[], StepResult]:
    """Start the copy to the host. Returns a function that waits for the copy and returns the step's result.

    states: of the model, saved for the rows with drafts. Rows whose drafts are not all accepted get them back.
    """
    requested = sampled.logprobs
    copy = HostCopy(sampled.token_ids, *(requested.tensors() if requested else ()))

    def read() -> StepResult:
        token_ids, *tensors = copy.wait()
        logprobs = Logprobs(requested.columns, *tensors).by_row(len(token_ids)) if requested else None
        if sampled.is_scored is None and not plan.drafts:
            return StepResult(plan.number, token_ids[:, None].tolist(), logprobs)
        is_scored = repeat(False) if sampled.is_scored is None else sampled.is_scored.tolist()
        result = _check_drafts(plan, _join_rows(plan, token_ids.tolist(), logprobs, is_scored))
        if states is not None:
            states.restore(_find_rejected(plan, result))
        return result

    return read


def _find_rejected(plan: StepPlan, result: StepResult) -> Iterator[tuple[int, int]]:
    """Yield the rows whose drafts were not all accepted, each with its place among the rows with drafts."""
    for place, drafts in enumerate(plan.drafts):
        index = plan.num_decodes + place
        if len(result.token_ids[index]) <= len(drafts):
            yield place, plan.rows[index]


def _join_rows(
    plan: StepPlan,
    token_ids: list[int],
    logprobs: list[list[TokenLogprobs] | None] | None,
    is_scored: Iterable[bool],
) -> StepResult:
    """Join the entries of each row: the tokens that were sampled, and all log probabilities."""
    sampled: list[list[int]] = []
    joined: list[list[TokenLogprobs] | None] = []
    entries = zip(token_ids, repeat(None) if logprobs is None else logprobs, is_scored, strict=False)
    for count in filter(None, plan.num_logits):
        of_row = list(islice(entries, count))
        sampled.append([token_id for token_id, _, scored in of_row if not scored])
        joined.append([each for _, some, _ in of_row for each in some or ()] or None)
    return StepResult(plan.number, sampled, None if logprobs is None else joined)


def _check_drafts(plan: StepPlan, result: StepResult) -> StepResult:
    """Keep of each row with drafts the tokens up to the first that is not its draft."""
    token_ids, logprobs = result.token_ids, list(result.logprobs or ())
    for index, drafts in enumerate(plan.drafts, start=plan.num_decodes):  # each decode has one entry
        sampled = token_ids[index]
        pairs = zip(drafts, sampled, strict=False)
        number = 1 + next((place for place, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
        token_ids[index] = sampled[:number]
        if logprobs and (of_row := logprobs[index]) is not None:
            logprobs[index] = of_row[:number]
    return StepResult(plan.number, token_ids, logprobs or None)
