"""The tasks that an engine may have, one of them each: what a request asks, what it costs, what comes out of it.

Made by `scheduler`, which is the same for both. Generation computes a prompt in pieces, keeps its keys and values in
blocks, and takes a token at a time; an embedding is one whole prompt in one step, of which nothing is kept but the
vector. Which device code computes it is `execution`'s matter.
"""

from itertools import repeat
from typing import Protocol

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.scheduling.answers import Answers
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import EngineRequest, ModelFacts, Params, PoolingParams, SamplingParams
from conveyor_engine.wire.step import StepResult

_NO_TOKENS: list[int] = []


class Task(Protocol):
    """What differs between tasks."""

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt is computed in one step, and so is never padded."""
        ...

    @property
    def dummy_params(self) -> Params:
        """Of a request that every model of this task can compute."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest if it could never be run. The API process checks too, and it alone reads all tokens."""
        ...

    def take(self, answers: Answers, step: Step, result: StepResult) -> None:
        """Tells the step's requests what came out. What it has for those that left meanwhile is discarded."""
        ...


class Generation:
    """Tokens that continue the prompt."""

    whole_prompts = False
    dummy_params = SamplingParams(max_tokens=1, temperature=0.0)

    def __init__(self, facts: ModelFacts) -> None:
        self._max_model_len = facts.max_model_len

    def check(self, request: EngineRequest) -> None:
        if not isinstance(request.params, SamplingParams):
            raise InvalidRequest("this engine generates text; it makes no embeddings", code=ErrorCode.WRONG_TASK)
        num_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        if num_tokens < 1 or max_tokens < 1:
            raise InvalidRequest("a request needs a token of prompt and one of output, at least", param="prompt")
        if num_tokens + max_tokens > self._max_model_len:
            message = f"{num_tokens} tokens of prompt and {max_tokens} of output are more than the context of"
            raise InvalidRequest(
                f"{message} {self._max_model_len}", param="max_tokens", code=ErrorCode.CONTEXT_LENGTH_EXCEEDED
            )

    def take(self, answers: Answers, step: Step, result: StepResult) -> None:
        logprobs = repeat(None) if result.logprobs is None else result.logprobs
        sampled = zip(result.token_ids, logprobs, strict=False)
        for work in step.work:
            token_ids, token_logprobs = next(sampled) if work.num_logits else (_NO_TOKENS, None)
            if work.is_wanted:
                answers.advance(work, token_ids, token_logprobs)


class Embedding:
    """A vector for the prompt."""

    whole_prompts = True
    dummy_params = PoolingParams()

    def __init__(self, facts: ModelFacts) -> None:
        self._max_model_len = facts.max_model_len

    def check(self, request: EngineRequest) -> None:
        if not isinstance(request.params, PoolingParams):
            raise InvalidRequest("this engine makes embeddings; it generates no text", code=ErrorCode.WRONG_TASK)
        num_tokens = len(request.prompt_token_ids)
        if num_tokens < 1:
            raise InvalidRequest("a request needs a token of prompt, at least", param="input")
        if num_tokens > self._max_model_len:
            raise InvalidRequest(
                f"{num_tokens} tokens are more than the context of {self._max_model_len}",
                param="input",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )

    def take(self, answers: Answers, step: Step, result: StepResult) -> None:
        assert result.vectors is not None
        for work, vector in zip(step.work, result.vectors, strict=True):
            if work.is_wanted:
                answers.take_vector(work, vector)


def build_task(facts: ModelFacts) -> Task:
    """The task of this model."""
    return Generation(facts) if facts.embedding is None else Embedding(facts)
