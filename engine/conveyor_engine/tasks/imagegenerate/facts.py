"""What travels of requests for pictures, and of models that make them: payloads and facts that only this task reads.

A request makes one picture. The result of its last step, and of a step whose picture is sent as a preview, is the
picture: a byte each of red, green and blue for each pixel, row after row. The result of any other step is `GOES_ON`.
"""

from array import array
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from conveyor_engine.wire.request import ModelFacts

GOES_ON: Final = b"\0"
STEPS_MAX: Final = 500  # that a request may ask for
SIDE_MULTIPLE: Final = 8  # as diffusers' pipeline demands
_PIXELS_TIMES: Final = 4  # of the model's own size, that a picture may have ...
_SIDE_TIMES: Final = 4  # ... and of its sides


class Size(NamedTuple):
    """The size of a picture in pixels."""

    width: int
    height: int

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


class PaintFacts(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The facts that only models that make pictures have."""

    size: Size  # of a picture whose request names none
    multiple: int  # of which each side must be a multiple
    max_pixels: int  # of a picture
    num_context_tokens: int  # of a prompt, padding included
    empty_tokens: bytes  # of an empty prompt, uint32 each: what warms it up
    nums_forwards: list[int]  # by the number of inference steps, from 1 on: how many steps of the engine these take

    def encode(self) -> bytes:
        """The `of_task` of the model's facts."""
        return msgspec.msgpack.encode(self)

    @property
    def max_side(self) -> int:
        return _SIDE_TIMES * max(self.size)

    def find_size(self, cost: int) -> Size:
        """The largest picture like the model's own that costs so many pixels with guidance, or the smallest one."""
        size = Size(self.multiple, self.multiple)
        for factor in range(1, 1 + max(self.size) * 2 // self.multiple):
            width, height = (max(1, side * factor // max(self.size)) * self.multiple for side in self.size)
            larger = Size(width, height)
            if 2 * larger.num_pixels <= min(cost, 2 * self.max_pixels):
                size = larger
        return size


@lru_cache(maxsize=1)
def _read(of_task: bytes) -> PaintFacts:
    return msgspec.msgpack.decode(of_task, type=PaintFacts)


def read_facts(facts: ModelFacts) -> PaintFacts:
    return _read(facts.of_task)


def find_max_pixels(size: Size) -> int:
    """The most pixels of a picture of a model whose own pictures have this size."""
    return _PIXELS_TIMES * size.num_pixels


class PaintRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The payload of a request: one picture."""

    size: Size
    num_inference_steps: int
    guidance_scale: float
    seed: int  # 64 bits
    packed_tokens: bytes  # of the prompt, uint32 each, padded
    packed_negative: bytes = b""  # of the negative prompt; empty: without guidance
    previews: tuple[int, ...] = ()  # steps of the engine, from 1 on, after which a preview is sent

    @property
    def has_guidance(self) -> bool:
        return bool(self.packed_negative)

    @property
    def cost(self) -> int:
        """The pixels that each step computes: with guidance twice those of the picture."""
        return self.size.num_pixels * (2 if self.has_guidance else 1)

    @property
    def group(self) -> int:
        """Equal for pictures of one size."""
        return self.size.width << 16 | self.size.height

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def read_request(payload: bytes) -> PaintRequest:
    return msgspec.msgpack.decode(payload, type=PaintRequest)


def read_tokens(packed: bytes) -> list[int]:
    return array("I", packed).tolist()
