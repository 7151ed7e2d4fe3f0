"""Reads whole request bodies, within limits, before the requests are queued.

Called by `request_life`. A body is kept until an engine has answered, so that it can be sent to another engine.
Therefore a body's size is limited (413). The sum of all bodies' bytes is limited too (503, by `capacity`), and so are
the time and the rate of a body's arrival (408). Bodies in gzip are decompressed while they arrive.
"""

import asyncio
import re
from collections.abc import Callable
from itertools import islice
from typing import Final, TypeVar

import msgspec
from aiohttp import StreamReader
from aiohttp.web import BaseRequest, RequestPayloadError

from conveyor_gateway.capacity.ledger import Hold, build_memory_full
from conveyor_gateway.errors import Code, GatewayError
from conveyor_protocol.gzip_bodies import BadGzip, Gunzip, is_gzip
from conveyor_protocol.surrogates import replace_lone_surrogates

T = TypeVar("T")
# The gateway parses no longer bodies. `python -m conveyor_bench loop` measures what parsing costs (ADR 125).
MAX_ROUTED_BYTES: Final = 1 << 20
# A body below this rate is rejected after a grace period. A body that is complete by then is fast enough.
MIN_BYTES_PER_SECOND: Final = 16 << 10
GRACE_SECONDS: Final = 10.0


class BodyReader:
    """Reads request bodies, and limits the size and the arrival time of each."""

    def __init__(self, max_request_bytes: int, timeout_seconds: float) -> None:
        self._max_request_bytes = max_request_bytes
        self._timeout_seconds = timeout_seconds

    async def read(self, request: BaseRequest, hold: Hold, path_max_bytes: int = 0) -> bytes:
        """Return the body, decompressed, with its bytes reserved in `hold`.

        path_max_bytes: the path's own limit, if its bodies may be longer than those of other paths.

        Raises GatewayError if the body is rejected.
        """
        max_bytes = max(self._max_request_bytes, path_max_bytes)
        if (request.content_length or 0) > max_bytes:
            raise _too_large(max_bytes)
        gunzip = _find_gunzip(request.headers.get("Content-Encoding"))
        _send_continue(request)
        try:
            if request.content.is_eof():  # most bodies arrive with their headers, and need no timer
                return await self._receive(request.content, hold, max_bytes, gunzip)
            body = await self._receive_in_time(request.content, hold, max_bytes, gunzip)
            await hold.wait_turn()
            return body
        except (RequestPayloadError, BadGzip) as error:
            raise GatewayError(f"the body cannot be read: {error}", Code.MALFORMED_BODY) from error

    async def _receive_in_time(self, content: StreamReader, hold: Hold, max_bytes: int, gunzip: Gunzip | None) -> bytes:
        began = asyncio.get_running_loop().time()
        hold.note_arriving()
        try:
            async with asyncio.timeout_at(began + self._limit_seconds(0)) as limit:

                def extend(num_received: int) -> None:
                    limit.reschedule(began + self._limit_seconds(num_received))

                return await self._receive(content, hold, max_bytes, gunzip, extend)
        except TimeoutError:
            raise self._too_slow(began) from None

    async def _receive(
        self,
        content: StreamReader,
        hold: Hold,
        max_bytes: int,
        gunzip: Gunzip | None,
        on_piece: Callable[[int], None] = lambda num_received: None,
    ) -> bytes:
        received = bytearray()  # not a list of pieces, because each piece may have only one byte
        num_arrived = 0
        while arrived := await content.readany():
            num_arrived += len(arrived)
            if num_arrived > max_bytes:
                raise _too_large(max_bytes)
            if gunzip is not None:
                await _give_way(hold)  # what arrives may have many blocks and no output
            for piece in (arrived,) if gunzip is None else gunzip.feed(arrived):
                if not hold.reserve(len(piece)):
                    raise build_memory_full()
                if hold.size_bytes > max_bytes:
                    raise _too_large(max_bytes)
                received += piece
                if gunzip is not None:
                    on_piece(len(received))  # decompressing takes time too
                    await _give_way(hold)
            on_piece(max(num_arrived, len(received)))
        if gunzip is not None:
            gunzip.end()
        return bytes(received)

    def _limit_seconds(self, num_received: int) -> float:
        return min(self._timeout_seconds, GRACE_SECONDS + num_received / MIN_BYTES_PER_SECOND)

    def _too_slow(self, began: float) -> GatewayError:
        seconds = asyncio.get_running_loop().time() - began
        return GatewayError(
            f"the body had not arrived after {seconds:.1f} s: the limit is {self._timeout_seconds:g} s, and after "
            f"{GRACE_SECONDS:g} s it must average {MIN_BYTES_PER_SECOND} bytes a second",
            Code.BODY_TOO_SLOW,
        )


async def _give_way(hold: Hold) -> None:
    """Let the event loop serve others, and return in a turn in which the owner may do work."""
    await asyncio.sleep(0)
    await hold.wait_turn()


def _too_large(max_bytes: int) -> GatewayError:
    return GatewayError(f"the body is longer than {max_bytes} bytes", Code.REQUEST_TOO_LARGE)


def _find_gunzip(content_encoding: str | None) -> Gunzip | None:
    """Return what decompresses the body; None if it is not compressed. Raises GatewayError."""
    if (is_compressed := is_gzip(content_encoding)) is None:
        message = f"the body has Content-Encoding {content_encoding!r}; send it in gzip, or uncompressed"
        raise GatewayError(message, Code.ENCODED_BODY)
    return Gunzip() if is_compressed else None


def _send_continue(request: BaseRequest) -> None:
    """Respond to `Expect: 100-continue`. Without this, curl waits a second before it sends a body above 1 MiB."""
    expected = request.headers.get("Expect", "").lower() == "100-continue"
    if expected and not request.content.is_eof() and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


class _Body(msgspec.Struct):
    """The members that the gateway reads from a body. The rest is only checked to be valid JSON, and not built."""

    model: msgspec.Raw = msgspec.Raw(b"null")


_BODY: Final = msgspec.json.Decoder(_Body)
_MAX_PLACES: Final = 2  # places of a body that are tried as its `model`, each of which costs as much as `read_model`


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body, which may have lone surrogates: engines replace them. Raises msgspec.DecodeError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return decoder.decode(replace_lone_surrogates(body))


def read_model(body: bytes) -> str:
    """Return the `model` of the JSON object in `body`, for requests that are routed by their body.

    Raises GatewayError.
    """
    try:
        model = decode(_BODY, body).model
    except msgspec.ValidationError:
        raise GatewayError("the body must be a JSON object", Code.INVALID_JSON) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise GatewayError(f"the body is not JSON: {error}", Code.INVALID_JSON) from None
    try:
        return msgspec.json.decode(model, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "model must be a string: it selects the service"
        raise GatewayError(message, Code.NO_MODEL, "model") from None


class _Streamed(msgspec.Struct):
    stream: bool = False


_STREAMED: Final = msgspec.json.Decoder(_Streamed)


def requests_stream(body: bytes) -> bool:
    """Return whether a body requests an event stream. False if it exceeds MAX_ROUTED_BYTES or cannot be parsed."""
    try:
        return len(body) <= MAX_ROUTED_BYTES and decode(_STREAMED, body).stream
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False


_ABSENT: Final = msgspec.Raw()


class QueueFields(msgspec.Struct):
    """The members of a body that decide its position in the queue, and those that begin its prompt."""

    priority: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    model: msgspec.Raw = _ABSENT
    cache_salt: msgspec.Raw = _ABSENT
    prompt_cache_key: msgspec.Raw = _ABSENT
    system: msgspec.Raw = _ABSENT  # in Anthropic's API
    instructions: msgspec.Raw = _ABSENT  # in OpenAI's Responses API, as `input`
    messages: msgspec.Raw = _ABSENT
    input: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT

    def count_answer_tokens(self, longest: int) -> int:
        """Return the limit on the answer's tokens; `longest` if the request has none."""
        limits = (self.max_output_tokens, self.max_completion_tokens, self.max_tokens)
        return max(0, next((limit for limit in limits if limit is not None), longest))


_QUEUE_FIELDS: Final = msgspec.json.Decoder(QueueFields)
NO_FIELDS: Final = QueueFields()


def read_queue_fields(body: bytes) -> QueueFields:
    """Read the fields. A body of more than MAX_ROUTED_BYTES is not read.

    If a field is invalid, no field is used: the engine then rejects the request.
    """
    try:
        return decode(_QUEUE_FIELDS, body) if len(body) <= MAX_ROUTED_BYTES else NO_FIELDS
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return NO_FIELDS


def rename_model(body: bytes, model: str) -> bytes:
    """Return the body with another model. Engines do not know the name `namespace/name` that clients may use.

    Only the bytes of the model are replaced. Splitting a body into its members would cost more than parsing it. Raises
    GatewayError.
    """
    wanted = msgspec.json.encode(model)
    written = bytes(memoryview(decode(_BODY, body).model))
    for place in islice(re.finditer(rb'"model"\s*:\s*' + re.escape(written), body), _MAX_PLACES):
        start = place.end() - len(written)
        renamed = b"".join((memoryview(body)[:start], wanted, memoryview(body)[place.end() :]))
        if names_model(renamed, wanted):  # otherwise the place is within another member
            return renamed
    message = "the gateway could not replace model: write its key once and without escapes, before other members"
    raise GatewayError(message, Code.INVALID_JSON, "model")


def names_model(body: bytes, model: bytes) -> bool:
    """Return whether the `model` of a body is written like this."""
    try:
        return memoryview(decode(_BODY, body).model) == model
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
