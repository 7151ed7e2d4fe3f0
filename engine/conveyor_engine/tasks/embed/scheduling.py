"""Prompts that each become a vector, as the scheduler sees them."""

from random import Random
from typing import Final

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.scheduling.tasks import OneStep
from conveyor_engine.wire.embedding import PoolingParams
from conveyor_engine.wire.request import EngineRequest, ModelFacts


class Embed(OneStep):
    """A request is one whole prompt; its payload says how its vector is made."""

    result_name = "vectors"
    not_finite = "the model's vector is not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._vocab_size, self._max_model_len = facts.vocab_size, facts.max_model_len

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """A prompt of random tokens."""
        random = Random(number)
        token_ids = [random.randrange(self._vocab_size) for _ in range(cost)]
        return EngineRequest(request_id=str(number), prompt_token_ids=token_ids, payload=PoolingParams().encode())

    def check(self, request: EngineRequest) -> None:
        super().check(request)
        num_tokens = len(request.prompt_token_ids)
        if num_tokens < 1:
            raise InvalidRequest("a request needs a token of prompt, at least", param="input")
        if num_tokens > self._max_model_len:
            raise InvalidRequest(
                f"{num_tokens} tokens are more than the context of {self._max_model_len}",
                param="input",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            )


TASK: Final = Embed
