"""What travels of requests to rank or classify, and of models that do: as payloads and facts that only they read.

A request's payload is the type of each token, a byte each; none where all types are 0. A result's payload is the logit
of each label, or of a model that classifies tokens three numbers for each: its likeliest label, that one's logit and
its probability. All are float32.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Literal, Self

import msgspec

from conveyor_engine.wire.request import ModelFacts

Activation = Literal["none", "sigmoid", "softmax"]


class ClassifierFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is particular of a model with a classifier's head."""

    labels: tuple[str, ...]
    activation: Activation  # what makes scores of its logits
    num_token_types: int = 1  # it tells the texts of a pair apart by them, if there are several
    classifies_tokens: bool = False  # each by itself

    def encode(self) -> bytes:
        """The `of_task` of the model's facts."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)


def encode_token_types(token_types: Sequence[int]) -> bytes:
    """The payload of a request. Raises ValueError for a type that no byte holds."""
    return bytes(token_types) if any(token_types) else b""


def read_logits(payload: bytes) -> "array[float]":
    """The logits of a result."""
    return array("f", payload)


def read_token_labels(payload: bytes) -> Iterator[tuple[int, float, float]]:
    """(label, logit, probability) of each token of a result."""
    numbers = iter(array("f", payload))
    return ((int(label), logit, score) for label, logit, score in zip(numbers, numbers, numbers, strict=True))
