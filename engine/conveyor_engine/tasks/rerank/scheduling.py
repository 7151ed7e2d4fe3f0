"""Scheduling of pairs of a query and a document, each of which gets a score."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStepPrompt


class Rerank(OneStepPrompt):
    """The task that ranks documents. The payload has the type of each token; if it is empty, all types are 0."""

    result_name = "scores"
    not_finite = "the model's score is not finite (NaN or infinity)"


TASK: Final = Rerank
