"""Encodes facts about a custom model, and the payloads of its results. Only this task reads them.

A result's payload begins with a byte. After `COMPUTED` the outputs follow; after `FAILED` an error message follows.
"""

from functools import lru_cache
from typing import Final

import msgspec

from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import Signature, Tensors, encode_tensors

COMPUTED: Final = b"\0"
FAILED: Final = b"\1"


class CustomFacts(msgspec.Struct, frozen=True, array_like=True):
    """The facts that only custom models have."""

    signature: Signature
    packs: bool  # whether a batch costs the sum of its items' costs

    def encode(self) -> bytes:
        """Encode the facts for `ModelFacts.of_task`."""
        return msgspec.msgpack.encode(self)


@lru_cache(maxsize=1)
def _read(of_task: bytes) -> CustomFacts:
    return msgspec.msgpack.decode(of_task, type=CustomFacts)


def read_facts(facts: ModelFacts) -> CustomFacts:
    return _read(facts.of_task)


def encode_outputs(outputs: Tensors) -> bytes:
    """Return the payload for an item that was computed."""
    return COMPUTED + encode_tensors(outputs)


def encode_failure(sentence: str) -> bytes:
    """Return the payload for an item that the model could not compute."""
    return FAILED + sentence.encode(errors="replace")
