"""Scheduling of texts that get a score for each label."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStepPrompt


class Classify(OneStepPrompt):
    """The task that classifies texts. The payload has the type of each token; if it is empty, all types are 0."""

    result_name = "logits"
    not_finite = "the model's logits are not finite (NaN or infinity)"


TASK: Final = Classify
