"""Texts that each get a score of every label, as the scheduler sees them."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStepPrompt


class Classify(OneStepPrompt):
    """Its payload has the types of its tokens; without one all are of the first type."""

    result_name = "logits"
    not_finite = "the model's logits are not finite (NaN or infinity)"


TASK: Final = Classify
