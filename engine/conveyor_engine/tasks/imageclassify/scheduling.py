"""Scheduling of images that get a score for each label. A pixel of a processed image costs 1."""

from array import array
from typing import Final

from conveyor_engine.scheduling.tasks import OneStep
from conveyor_engine.wire.images import ImageFacts, encode_pixels
from conveyor_engine.wire.request import EngineRequest, ModelFacts


class ImageClassify(OneStep):
    """The task that classifies images. Images of one shape share a forward pass without padding, so costs add up."""

    packs = True
    result_name = "logits"
    not_finite = "the model's logits are not finite (NaN or infinity)"

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self._shape = ImageFacts.read(facts).shape

    def build_dummy(self, number: int, cost: int) -> EngineRequest:
        """Build a request with an image of one colour in the model's shape. Its cost is fixed; `cost` has no effect."""
        numbers = array("f", [number % 16 / 16]) * (self._shape.num_bytes // 4)
        payload = encode_pixels(self._shape, numbers.tobytes())
        return EngineRequest(request_id=str(number), payload=payload, payload_cost=self._shape.num_pixels)


TASK: Final = ImageClassify
