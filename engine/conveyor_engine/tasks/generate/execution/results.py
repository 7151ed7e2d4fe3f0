"""Copies a step's sampled tokens to the host, and puts them in the order of the rows. Used by `runner`."""

from collections.abc import Callable
from itertools import islice

from conveyor_engine.execution.sampling.logprobs import Logprobs
from conveyor_engine.execution.sampling.sampler import Sampled
from conveyor_engine.execution.transfer import HostCopy
from conveyor_engine.wire.request import TokenLogprobs
from conveyor_engine.wire.step import StepPlan, StepResult


def start_copy(plan: StepPlan, sampled: Sampled) -> Callable[[], StepResult]:
    """Start the copy to the host. Returns a function that waits for the copy and returns the step's result."""
    requested = sampled.logprobs
    copy = HostCopy(sampled.token_ids, *(requested.tensors() if requested else ()))

    def read() -> StepResult:
        token_ids, *tensors = copy.wait()
        logprobs = Logprobs(requested.columns, *tensors).by_row(len(token_ids)) if requested else None
        if sampled.is_scored is None:
            return StepResult(plan.number, token_ids[:, None].tolist(), logprobs)
        assert logprobs is not None
        return _join_rows(plan, token_ids.tolist(), logprobs, sampled.is_scored.tolist())

    return read


def _join_rows(
    plan: StepPlan, token_ids: list[int], logprobs: list[list[TokenLogprobs] | None], is_scored: list[bool]
) -> StepResult:
    """Join the entries of each row: the tokens that were sampled, and all log probabilities."""
    sampled: list[list[int]] = []
    joined: list[list[TokenLogprobs] | None] = []
    entries = iter(zip(token_ids, logprobs, is_scored, strict=True))
    for count in filter(None, plan.num_logits):
        of_row = list(islice(entries, count))
        sampled.append([token_id for token_id, _, scored in of_row if not scored])
        joined.append([each for _, some, _ in of_row for each in some or ()] or None)
    return StepResult(plan.number, sampled, joined)
