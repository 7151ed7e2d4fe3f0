"""What travels of requests to embed, and of models that do: as payloads and facts that only this task reads."""

from typing import Self

import msgspec

from conveyor_engine.wire.request import ModelFacts


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How a prompt's vector is made. The API process validates the values."""

    dimensions: int | None = None  # only so many, the first ones, if the model was trained for it; None: all

    def encode(self) -> bytes:
        """The payload of a request."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, payload: bytes) -> Self:
        return msgspec.msgpack.decode(payload, type=cls)


class EmbeddingFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What is particular of a model that embeds."""

    size: int  # dimensions of its vectors
    is_matryoshka: bool = False  # the first dimensions of a vector are one too ...
    matryoshka_dimensions: tuple[int, ...] = ()  # ... so many of them; any number if none are named

    def encode(self) -> bytes:
        """The `of_task` of the model's facts."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)

    def allows(self, dimensions: int) -> bool:
        """Whether so many dimensions may be asked for."""
        if dimensions == self.size:
            return True
        named = self.matryoshka_dimensions
        return self.is_matryoshka and (dimensions in named if named else 1 <= dimensions < self.size)
