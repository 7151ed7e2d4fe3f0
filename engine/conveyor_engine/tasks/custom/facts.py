"""What travels of custom models and their results: as facts and payloads that only this task reads.

A result's payload begins with a byte: `COMPUTED`, and the outputs follow, or `FAILED`, and a sentence follows.
"""

from functools import lru_cache
from typing import Final

import msgspec

from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import Signature, Tensors, encode_tensors

COMPUTED: Final = b"\0"
FAILED: Final = b"\1"


class CustomFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is particular of a custom model."""

    signature: Signature
    packs: bool  # whether a batch costs the sum of its items

    def encode(self) -> bytes:
        """The `of_task` of the model's facts."""
        return msgspec.msgpack.encode(self)


@lru_cache(maxsize=1)
def _read(of_task: bytes) -> CustomFacts:
    return msgspec.msgpack.decode(of_task, type=CustomFacts)


def read_facts(facts: ModelFacts) -> CustomFacts:
    return _read(facts.of_task)


def encode_outputs(outputs: Tensors) -> bytes:
    """The payload of an item that was computed."""
    return COMPUTED + encode_tensors(outputs)


def encode_failure(sentence: str) -> bytes:
    """The payload of an item that the model could not compute."""
    return FAILED + sentence.encode(errors="replace")
