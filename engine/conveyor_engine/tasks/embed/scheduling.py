"""Prompts that each become a vector, as the scheduler sees them."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStepPrompt
from conveyor_engine.wire.embedding import PoolingParams


class Embed(OneStepPrompt):
    """Its payload says how its vector is made."""

    result_name = "vectors"
    not_finite = "the model's vector is not finite (NaN or infinity)"
    dummy_payload = PoolingParams().encode()


TASK: Final = Embed
