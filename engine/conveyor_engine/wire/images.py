"""Messages of the task that classifies images: the payload of a request and the facts of a model.

The payload is the output of the model's image processor for one image: its shape, and float32 numbers.
"""

import struct
from typing import Final, NamedTuple, Self

import msgspec

from conveyor_engine.wire.classification import Activation
from conveyor_engine.wire.request import ModelFacts

_SHAPE: Final = struct.Struct("<III")


class PictureShape(NamedTuple):
    """The shape of one processed image."""

    channels: int
    height: int
    width: int

    @property
    def num_pixels(self) -> int:
        """Return the image's cost in a step's budget."""
        return self.height * self.width

    @property
    def num_bytes(self) -> int:
        return 4 * self.channels * self.height * self.width


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that only models that classify images have."""

    labels: tuple[str, ...]
    activation: Activation  # the function that turns logits into scores, unless a request chooses another
    shape: PictureShape  # of the image for the warm-up; of all images if the processor produces one size

    def encode(self) -> bytes:
        """Encode the facts for `ModelFacts.of_task`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, facts: ModelFacts) -> Self:
        return msgspec.msgpack.decode(facts.of_task, type=cls)


def encode_pixels(shape: PictureShape, pixels: bytes) -> bytes:
    """Return the payload of a request. `pixels` are float32, channels first."""
    assert len(pixels) == shape.num_bytes
    return _SHAPE.pack(*shape) + pixels


def read_pixels(payload: bytes) -> tuple[PictureShape, memoryview]:
    """Return the shape and the float32 numbers of a payload. The numbers are not copied."""
    return PictureShape(*_SHAPE.unpack_from(payload)), memoryview(payload)[_SHAPE.size :]
