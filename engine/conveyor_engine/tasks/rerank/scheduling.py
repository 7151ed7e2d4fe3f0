"""Pairs of a query and a document that each get a score, as the scheduler sees them."""

from typing import Final

from conveyor_engine.scheduling.tasks import OneStepPrompt


class Rerank(OneStepPrompt):
    """Its payload has the types of its tokens; without one all are of the first type."""

    result_name = "scores"
    not_finite = "the model's score is not finite (NaN or infinity)"


TASK: Final = Rerank
