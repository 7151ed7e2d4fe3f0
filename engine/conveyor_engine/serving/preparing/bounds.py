"""Checks the tokens and the log probabilities that a request names against the model and against limits. Pure.

Used by `prepare` and by the modules of other kinds of bodies.
"""

from collections.abc import Sequence

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.schemas import SamplingFields
from conveyor_engine.wire.request import ModelFacts, SamplingParams

LOGPROBS_MAX = 4_000_000  # in one request: each takes 12 bytes until its response is sent, and 60 in the response


def check_listed_tokens(fields: SamplingFields, bad_words: Sequence[Sequence[int]], facts: ModelFacts) -> None:
    """Raise InvalidRequest if a field lists a token that the model does not have."""
    listed = {
        "stop_token_ids": fields.stop_token_ids or (),
        "logit_bias": [token_id for token_id, _ in fields.logit_bias],
        "allowed_token_ids": fields.allowed_token_ids or (),
        "logprob_token_ids": fields.logprob_token_ids or (),
        "bad_words": [token_id for word in bad_words for token_id in word],
    }
    for name, token_ids in listed.items():
        if (largest := max(token_ids, default=0)) >= facts.vocab_size:
            known = f"the model has {facts.vocab_size} tokens, 0 to {facts.vocab_size - 1}"
            raise InvalidRequest(f"{name} has the token id {largest}, but {known}", param=name)


def check_token_ids(prompt: list[int], facts: ModelFacts, param: str) -> None:
    """Raise InvalidRequest if the prompt is empty or has a token that the model does not have."""
    if not prompt:
        raise InvalidRequest("the prompt is empty; send at least one token", param=param)
    if (largest := max(prompt)) >= facts.vocab_size:
        known = f"prompt token ids must be from 0 to {facts.vocab_size - 1}"
        raise InvalidRequest(f"token id {largest} is out of vocabulary: {known}", param=param)


def check_logprobs(fields: SamplingFields, params: list[SamplingParams], num_prompt_tokens: int) -> None:
    """Raise InvalidRequest if the request asks for too many log probabilities.

    num_prompt_tokens: number of prompt tokens that get log probabilities, over all choices.
    """
    total = sum(
        p.max_tokens * (max(p.logprobs, len(p.logprob_token_ids)) + 1) for p in params if p.logprobs is not None
    )
    total += num_prompt_tokens * ((fields.prompt_logprobs_wanted() or 0) + 1)
    if total > LOGPROBS_MAX:
        most = f"tokens x (alternatives + 1), over all choices, is {total}"
        raise InvalidRequest(
            f"logprobs asks for too many log probabilities: {most}, more than {LOGPROBS_MAX}; lower one of them, or n",
            param="logprobs",
        )
