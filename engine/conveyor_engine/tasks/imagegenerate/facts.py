"""Messages of the task that generates pictures: the payload of a request, and the facts of a model.

Each request makes one picture. Requests that differ only in their seed share a payload; the seed is in their `params`.
Each step of a request has a result. The result of the last step is the picture, and the result of a step with a
preview is the preview. Both have three bytes (red, green, blue) for each pixel, row by row. The result of any other
step is `GOES_ON`. If the latents are not finite, the result is empty.
"""

from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from conveyor_engine.wire.request import ModelFacts, SamplingParams

GOES_ON: Final = b"\0"
STEPS_MAX: Final = 500  # limit on a request's inference steps
SIDE_MULTIPLE: Final = 8  # diffusers' pipeline requires sides that are multiples of 8 pixels
_PIXELS_TIMES: Final = 4  # limit on a picture's pixels, as a multiple of the pixels of the model's own size
_SIDE_TIMES: Final = 4  # limit on a picture's longer side, as a multiple of the longer side of the model's own size


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

    size: Size  # the size of a picture if the request names none
    multiple: int  # each side must be a multiple of this number of pixels
    max_pixels: int  # limit on the pixels of a picture
    max_side: int  # limit on a picture's longer side
    empty_tokens: list[bytes]  # the tokens of an empty prompt for each text encoder, uint32; used for the warm-up
    nums_forwards: list[int]  # element i is the number of engine steps that i + 1 inference steps take
    num_steps: int  # inference steps of a request that names no number
    guidance: float  # guidance of a request that names none
    guides: bool  # whether guidance computes each picture a second time without the prompt, so that it costs twice
    strength: float  # strength of an edit that names none
    rounds_up: bool  # whether an edit rounds the number of its inference steps up, as diffusers does for flow models

    def count_skipped(self, num_inference_steps: int, strength: float) -> int:
        """Return how many timesteps an edit of this strength leaves out at the beginning."""
        wanted = num_inference_steps * strength
        return int(num_inference_steps - wanted) if self.rounds_up else num_inference_steps - int(wanted)

    def encode(self) -> bytes:
        """Encode the facts for `ModelFacts.of_task`."""
        return msgspec.msgpack.encode(self)

    @property
    def rows(self) -> int:
        """The rows that a picture with guidance takes in a forward pass. Each row costs its pixels."""
        return 2 if self.guides else 1

    def find_size(self, cost: int) -> Size:
        """Return the largest size, in the model's proportions, whose picture with guidance costs at most `cost` pixels.

        If no such size exists, return the smallest one.
        """
        size = Size(self.multiple, self.multiple)
        for factor in range(1, 1 + max(self.size) * 2 // self.multiple):
            width, height = (max(1, side * factor // max(self.size)) * self.multiple for side in self.size)
            larger = Size(width, height)
            if max(larger) <= self.max_side and larger.num_pixels <= min(cost // self.rows, self.max_pixels):
                size = larger
        return size


@lru_cache(maxsize=1)
def _read(of_task: bytes) -> PaintFacts:
    return msgspec.msgpack.decode(of_task, type=PaintFacts)


def read_facts(facts: ModelFacts) -> PaintFacts:
    return _read(facts.of_task)


def find_max_pixels(size: Size) -> int:
    """Return the limit on a picture's pixels. size: the model's own size."""
    return _PIXELS_TIMES * size.num_pixels


def find_max_side(size: Size) -> int:
    """Return the limit on a picture's longer side. size: the model's own size."""
    return _SIDE_TIMES * max(size)


class PaintRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The payload of a request: one picture, except for its seed."""

    size: Size
    num_inference_steps: int
    guidance_scale: float
    has_guidance: bool  # whether each step also computes the picture without the prompt, or with the negative one
    packed_tokens: list[bytes]  # the tokens of the prompt for each text encoder, uint32, padded
    packed_negative: list[bytes] = []  # the same of the negative prompt; empty: the request has none
    previews: tuple[int, ...] = ()  # numbers of the engine steps, from 1 on, after which a preview is sent
    image: bytes = b""  # the picture to edit, of this size: red, green and blue of each pixel; empty: there is none
    num_skipped: int = 0  # timesteps that an edit leaves out at the beginning

    @property
    def cost(self) -> int:
        """The number of pixels that each step computes: the picture's number of pixels, or with guidance twice that."""
        return self.size.num_pixels * (2 if self.has_guidance else 1)

    @property
    def group(self) -> int:
        """A number for the picture's size. Pictures with the same number share a forward pass."""
        return self.size.width << 16 | self.size.height

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def build_params(seed: int) -> SamplingParams:
    """Return the parameters of a request. seed: 64 bits."""
    return SamplingParams(max_tokens=0, seed=seed)


def read_request(payload: bytes) -> PaintRequest:
    return msgspec.msgpack.decode(payload, type=PaintRequest)
