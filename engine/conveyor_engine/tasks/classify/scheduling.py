"""Scheduling of texts that get a score for each label."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStepPrompt


class Classify(OneStepPrompt):
    """The task that classifies texts. A payload has the types of the tokens; without it all are of the first type."""

    result_name = "logits"
    not_finite = "the model's logits are not finite (NaN or infinity)"


TASK: Final = Classify
