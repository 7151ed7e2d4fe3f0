"""Encodes payloads and facts of the tasks that rank and classify texts. Only these tasks read them.

A request's payload is the type of each token, one byte each; it is empty if all types are 0. A result's payload is the
logit of each label. If the model classifies tokens, it is three numbers for each token: its most likely label, that
label's logit, and its probability. All numbers are float32.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import msgspec

from conveyor_engine.wire.request import ModelFacts

Activation = Literal["none", "sigmoid", "softmax"]


class PairTemplate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a model's chat template renders a pair: as messages of the roles `query` and `document`."""

    instruction: str = ""  # the model's own, as a first message of the role `system`; empty: no such message
    in_parts: bool = False  # whether the content of a message is a list of parts
    add_generation_prompt: bool = False
    variables: dict[str, Any] = {}  # other variables for the template

    def list_messages(self, query: str, document: str, instruction: str | None = None) -> list[dict[str, Any]]:
        """Return the messages of a pair. instruction: in place of the model's own; None: the model's own."""
        texts = {
            "system": self.instruction if instruction is None else instruction, "query": query, "document": document
        }  # fmt: skip
        return [
            {"role": role, "content": [{"type": "text", "text": text}] if self.in_parts else text}
            for role, text in texts.items()
            if text or role != "system"
        ]


class ClassifierFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that only models that rank or classify have."""

    labels: tuple[str, ...]
    activation: Activation  # the function that turns logits into scores
    num_token_types: int = 1  # if above 1, the types distinguish the texts of a pair
    classifies_tokens: bool = False  # whether it classifies each token by itself
    template: PairTemplate | None = None  # None: the tokenizer itself joins the texts of a pair

    def encode(self) -> bytes:
        """Encode the facts for `ModelFacts.of_task`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)


def encode_token_types(token_types: Sequence[int]) -> bytes:
    """Return the payload of a request. Raises ValueError for a type that does not fit in a byte."""
    return bytes(token_types) if any(token_types) else b""


def read_logits(payload: bytes) -> "array[float]":
    """Return the logits of a result."""
    return array("f", payload)


def read_token_labels(payload: bytes) -> Iterator[tuple[int, float, float]]:
    """Return (label, logit, probability) for each token of a result."""
    numbers = iter(array("f", payload))
    return ((int(label), logit, score) for label, logit, score in zip(numbers, numbers, numbers, strict=True))
