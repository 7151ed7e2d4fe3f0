"""Computes scores from logits as transformers' pipelines and sentence-transformers do. Used by tasks."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from conveyor_engine.wire.classification import Activation, ClassifierFacts
from conveyor_engine.wire.request import ModelFacts


class Prediction(msgspec.Struct):
    """The score of one label."""

    score: float
    label: str


def describe_labels(facts: ModelFacts) -> dict[str, dict[str, Any]]:
    """Return the labels of a model that ranks or classifies as config.json has them: `id2label` and `label2id`."""
    labels = ClassifierFacts.read(facts).labels
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def rank(scores: Sequence[float], labels: Sequence[str]) -> list[Prediction]:
    """Return all labels with their scores, best first. Equal scores keep the labels' order."""
    predictions = [Prediction(*each) for each in zip(scores, labels, strict=True)]
    return sorted(predictions, key=lambda prediction: prediction.score, reverse=True)


def activate(logits: Sequence[float], activation: Activation) -> list[float]:
    """Return the scores of one input, in the labels' order."""
    if activation == "none":
        return list(logits)
    if activation == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    highest = max(logits)
    powers = [math.exp(logit - highest) for logit in logits]
    whole = sum(powers)
    return [power / whole for power in powers]


def _sigmoid(logit: float) -> float:
    """Return the sigmoid, without overflow for large positive or negative logits."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)
