"""Serves /v1/images/generations and /v1/images/edits: pictures in base64, whole or as a stream with previews."""

import asyncio
import base64
import io
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.types import Send

from conveyor_engine.errors import RequestError
from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.events import SSE_HEADERS, encode, event
from conveyor_engine.serving.http.failures import failure_body
from conveyor_engine.serving.http.one_step import OneStepResponse, write_with
from conveyor_engine.serving.http.receipts import Receipt
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths
from conveyor_engine.serving.http.usage import build_last_words
from conveyor_engine.tasks.imagegenerate.bodies import ImageEditForm, ImageGenerationRequest
from conveyor_engine.tasks.imagegenerate.preparing import PreparedPictures
from conveyor_engine.wire.request import RequestOutput


class TextTokens(msgspec.Struct):
    """The number of tokens of the prompts, by kind."""

    text_tokens: int
    image_tokens: int = 0


class PictureUsage(msgspec.Struct):
    """The number of tokens of the prompts, without padding. Pictures have no tokens."""

    input_tokens: int
    total_tokens: int
    input_tokens_details: TextTokens
    output_tokens: int = 0
    receipt: Receipt | UnsetType = UNSET


class Picture(msgspec.Struct):
    """One picture, and the seed that reproduces it."""

    b64_json: str
    seed: int


class PictureList(msgspec.Struct):
    """The answer without `stream`."""

    created: int
    data: list[Picture]
    size: str
    usage: PictureUsage
    output_format: Literal["png"] = "png"
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class PartialPicture(msgspec.Struct, tag="image_generation.partial_image"):
    """An event with a preview."""

    b64_json: str
    created_at: int
    size: str
    partial_image_index: int
    output_format: Literal["png"] = "png"
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class CompletedPicture(msgspec.Struct, tag="image_generation.completed"):
    """The last event of a stream, with the finished picture."""

    b64_json: str
    created_at: int
    size: str
    seed: int
    usage: PictureUsage
    output_format: Literal["png"] = "png"
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class PartialEdit(PartialPicture, tag="image_edit.partial_image"):
    """An event with a preview of an edited picture."""


class CompletedEdit(CompletedPicture, tag="image_edit.completed"):
    """The last event of a stream, with the edited picture."""


class PicturesResponse(OneStepResponse):
    """Sends all pictures, or one error. A stream has one picture, and previews before it."""

    partial: ClassVar[type[PartialPicture]] = PartialPicture
    completed: ClassVar[type[CompletedPicture]] = CompletedPicture

    def __init__(self, opened: Opened) -> None:
        assert isinstance(opened.prepared, PreparedPictures)
        super().__init__(opened, opened.prepared)
        self._prepared = opened.prepared
        self._num_previews = 0

    async def _send_answer(self, send: Send) -> None:
        if self._prepared.stream:
            await self._send_stream(send)
        else:
            await super()._send_answer(send)

    async def _send_payloads(self, payloads: Sequence[bytes], send: Send) -> None:
        encoded = []
        for payload in payloads:
            encoded.append(await self._encode(payload))
            self._held.grow(len(encoded[-1]))
        usage = self._describe_usage()
        whole = PictureList(int(time.time()), [], str(self._prepared.size), usage)
        await self._send_json(_write_pictures(whole, encoded, self._prepared.seeds), send)

    async def _send_stream(self, send: Send) -> None:
        """Send events. The status is sent with the first event, so a failure before that has an error status."""
        self._observe_prompts()
        try:
            async for outputs in self._generation.batches():
                for output in outputs:
                    await self._send_event(output, send)
            last = b""
        except RequestError as error:
            if not self._started:
                raise
            self._note_failure(error)
            last = event(failure_body(error), "error")
        await send({"type": "http.response.body", "body": last + build_last_words(self._report)})

    async def _send_event(self, output: RequestOutput, send: Send) -> None:
        is_last = output.finish_reason is not None
        if is_last:
            self._add(output)
        assert output.payload is not None
        encoded, now, size = await self._encode(output.payload), int(time.time()), str(self._prepared.size)
        picture: PartialPicture | CompletedPicture
        if is_last:
            picture = self.completed(encoded, now, size, self._prepared.seeds[0], self._describe_usage())
        else:
            picture = self.partial(encoded, now, size, self._num_previews)
            self._num_previews += 1
        if not self._started:
            await self._start(list(SSE_HEADERS), send)
        name = type(picture).__struct_config__.tag
        await send({"type": "http.response.body", "body": event(encode(picture), str(name)), "more_body": True})

    async def _encode(self, pixels: bytes) -> str:
        """Return the picture as PNG in base64. A thread encodes it, so that other answers are not delayed."""
        return await asyncio.to_thread(_encode_picture, *self._prepared.size, pixels)

    def _describe_usage(self) -> PictureUsage:
        num_tokens = sum(self._prepared.nums_prompt_tokens)
        return PictureUsage(num_tokens, num_tokens, TextTokens(num_tokens), receipt=self._find_receipt())


class EditsResponse(PicturesResponse):
    """The same for edited pictures."""

    partial = PartialEdit
    completed = CompletedEdit


def _encode_picture(width: int, height: int, pixels: bytes) -> str:
    return base64.b64encode(encode_png(width, height, pixels)).decode()


def _write_pictures(whole: PictureList, encoded: Sequence[str], seeds: Sequence[int]) -> Iterator[bytes]:
    return write_with(whole, "data", map(Picture, encoded, seeds))


async def generate_images(request: Request) -> PicturesResponse:
    """Generate pictures. Each picture is a separate engine request, so it shares steps with those of other requests."""
    return PicturesResponse(await open_request(request, "pictures"))


async def edit_images(request: Request) -> EditsResponse:
    """Generate pictures that begin as the picture in the form. They share steps with all other pictures."""
    return EditsResponse(await open_request(request, "edits"))


def encode_png(width: int, height: int, pixels: bytes) -> bytes:
    """Return the PNG file. `pixels`: one byte each for red, green and blue, row by row.

    Call it in a thread, not in an event loop: it takes 20 ms for each million pixels.
    """
    from PIL import Image  # imported only when needed, because it takes memory

    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG", compress_level=3)
    return file.getvalue()


TASK: Final = TaskPaths(
    (
        TaskPath(
            "/v1/images/generations", generate_images, "Makes pictures of a prompt.",
            ImageGenerationRequest, PictureList, events=(PartialPicture, CompletedPicture),
        ),
        TaskPath(
            "/v1/images/edits", edit_images, "Makes pictures of a prompt and a picture.", None, PictureList,
            form=ImageEditForm, events=(PartialEdit, CompletedEdit),
        ),
    ),
    inputs_bytes_max=8 * 2**20,  # a gateway's default limit for a body
)  # fmt: skip
