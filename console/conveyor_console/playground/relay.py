"""Sends a request to a gateway and collects its answer, within limits. Knows no page."""

import asyncio
import io
import logging
import ssl
import time
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from conveyor_console.playground.answers import (
    Answer,
    Piece,
    describe_error,
    read_answer,
    read_event,
    show_receipt,
)
from conveyor_console.playground.api_requests import ApiRequest
from conveyor_http.reading import AnswerTooLong
from conveyor_http.reading import read_answer as read_body
from conveyor_protocol.request_headers import RECEIPT_HEADER, REQUEST_ID_HEADER

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 4 << 20  # of pictures and of streams
MAX_PARSED_BYTES: Final = 1 << 20  # of other answers: parsed, they take up to 30 times as much memory
MAX_TEXT: Final = 256 << 10  # characters of a stream's text and thinking
_MAX_LINE_BYTES: Final = 256 << 10
_MAX_SECONDS: Final = 560.0  # a service at zero may download its model first
_CONNECT_SECONDS: Final = 5.0
_DATA: Final = b"data:"
_END: Final = b"[DONE]"


@dataclass(slots=True)
class Progress:
    """What has come of an answer."""

    text: list[str] = field(default_factory=list)
    """Pieces of a stream."""
    answer: Answer | None = None
    """Of a request without a stream."""
    began: bool = False
    """Whether the answer has begun, without an error."""
    reason: str = ""
    """Why a stream's text ended."""
    problem: str = ""
    """Why there is no whole answer; "" if there is one."""
    receipt: str = ""
    """As JSON; "" if the answer has none."""
    status: int = 0
    _receipt: bytes = b""
    _num_chars: int = 0
    _new: list[Piece] = field(default_factory=list)

    def take(self) -> tuple[str, str]:
        """Return the text and the model's thinking that have come since the last call."""
        taken, self._new = self._new, []
        return "".join(piece.text for piece in taken), "".join(piece.thinking for piece in taken)

    def add(self, data: bytes) -> None:
        """Add an event of a stream. Raises AnswerTooLong."""
        piece = read_event(data)
        self._num_chars += len(piece.text) + len(piece.thinking)
        if self._num_chars > MAX_TEXT:
            raise AnswerTooLong
        self.text.append(piece.text)
        self._new.append(piece)
        self.problem = piece.problem or self.problem
        self.reason = piece.reason or self.reason
        self._receipt = piece.receipt or self._receipt

    def end(self, header: str) -> None:
        """Note that the answer has ended. header: X-Receipt."""
        self.receipt = show_receipt(self._receipt if self.answer is None else self.answer.receipt, header)
        if self.answer is None and not self.reason and not self.problem:
            self.problem = "The stream ended before the answer was complete."


class Relay:
    """Sends requests to the gateways at `url`. tls: verifies them, if the URL is https://."""

    def __init__(self, session: aiohttp.ClientSession, url: str, tls: ssl.SSLContext) -> None:
        self._session = session
        self._url = url
        self._tls = tls
        self._parsing = asyncio.Lock()  # one answer at a time, because of its memory

    async def send(self, service: str, request: ApiRequest, key: str, request_id: str, progress: Progress) -> None:
        """Send the request, and write into `progress` what comes. If cancelled, the gateway ends the request."""
        headers = {RECEIPT_HEADER: "true", REQUEST_ID_HEADER: request_id}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        began = time.monotonic()
        try:
            async with asyncio.timeout(_MAX_SECONDS):
                async with self._session.post(
                    f"{self._url}/{service}{request.path}",
                    headers=headers,
                    data=_build_form(request),
                    json=request.body,
                    timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS),
                    allow_redirects=False,
                    ssl=self._tls,
                ) as response:
                    await self._read(response, request, progress)
        except TimeoutError:
            waited = time.monotonic() - began
            progress.problem = f"There was no whole answer within {waited:.0f} s."
        except AnswerTooLong:
            progress.problem = "The answer is longer than the console shows. Use the command."
        except (aiohttp.ClientError, OSError) as error:
            logger.debug("event=relay_failed request_id=%s error=%s", request_id, error or type(error).__name__)
            progress.problem = "The connection broke off." if progress.status else "No gateway can be reached."

    async def _read(self, response: aiohttp.ClientResponse, request: ApiRequest, progress: Progress) -> None:
        progress.status = response.status
        if response.status != 200:
            body = bytes(await read_body(response.content, MAX_PARSED_BYTES))
            progress.problem = describe_error(response.status, body, response.headers.get("Retry-After", ""))
            return
        progress.began = True
        if request.reading == "events":
            await _read_events(response.content, progress)
        else:
            most = MAX_ANSWER_BYTES if request.reading == "pictures" else MAX_PARSED_BYTES
            body = bytes(await read_body(response.content, most))
            async with self._parsing:
                progress.answer = await asyncio.to_thread(read_answer, request, body)
        progress.end(response.headers.get(RECEIPT_HEADER, ""))


def _build_form(request: ApiRequest) -> aiohttp.FormData | None:
    if request.upload is None:
        return None
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in request.parts:
        form.add_field(name, value)
    form.add_field(
        request.file_part, io.BytesIO(request.upload.content), filename=request.upload.name,
        content_type="application/octet-stream",
    )  # fmt: skip
    return form


async def _read_events(content: aiohttp.StreamReader, progress: Progress) -> None:
    rest, num_bytes = b"", 0
    async for piece in content.iter_any():
        num_bytes += len(piece)
        if num_bytes > MAX_ANSWER_BYTES:
            raise AnswerTooLong
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise AnswerTooLong
        for line in lines:
            if line.startswith(_DATA) and (data := line[len(_DATA) :].strip()) != _END:
                progress.add(data)
