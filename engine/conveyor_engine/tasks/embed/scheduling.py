"""Scheduling of prompts and images that each become a vector."""

from array import array
from typing import Final

from conveyor_engine.scheduling.tasks import OneStep, OneStepPrompt
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.request import EngineRequest, ModelFacts


class Embed(OneStepPrompt):
    """The task that embeds. A request's payload has its pooling parameters and, for an image, the pixels."""

    result_name = "vectors"
    not_finite = "the model's vector is not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        embedding = EmbeddingFacts.read(facts)
        self._pictures = embedding.pictures
        self.dummy_payload = PoolingParams(output=embedding.outputs[0]).encode()

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request with a prompt.

        If the model embeds images and `number` is even, build a request with an image instead. Its cost is fixed.
        """
        if self._pictures is None or number % 2:
            return super().build_dummy(number, cost)
        pixels = array("f", [number % 16 / 16]) * (self._pictures.shape.num_bytes // 4)
        payload = PoolingParams(pixels=pixels.tobytes()).encode()
        return EngineRequest(request_id=str(number), payload=payload, payload_cost=self._pictures.num_tokens)

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequest as for a prompt, except that an image needs no tokens."""
        if self._pictures is None or request.prompt_token_ids:
            super().check(request)
        else:
            OneStep.check(self, request)


TASK: Final = Embed
