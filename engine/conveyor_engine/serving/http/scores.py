"""Scores of logits, as transformers' pipelines and sentence-transformers make them. Used by tasks."""

import math
from collections.abc import Sequence

from conveyor_engine.wire.classification import Activation


def activate(logits: Sequence[float], activation: Activation) -> list[float]:
    """The scores of one input, in the labels' order."""
    if activation == "none":
        return list(logits)
    if activation == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    whole = sum(powers)
    return [power / whole for power in powers]


def _sigmoid(logit: float) -> float:
    """Without overflow on either side."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)
