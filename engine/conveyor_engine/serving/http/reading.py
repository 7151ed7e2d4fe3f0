"""Reads a request's headers and body, with limits on time and bytes."""

import asyncio
import re

from starlette.requests import ClientDisconnect, Request

from conveyor_engine import registry
from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.http.memory import Held
from conveyor_engine.serving.http.task_paths import TaskPaths
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.worker import INPUTS_MAX
from conveyor_protocol.gzip_bodies import BadGzip, Gunzip, is_gzip
from conveyor_protocol.open_inference import JSON_LENGTH_HEADER
from conveyor_protocol.request_headers import (
    LEVEL_HEADER,
    REQUEST_TIMEOUT_HEADER,
    parse_level,
    parse_timeout_seconds,
)

BODY_BYTES_PER_TOKEN = 32  # for each token of the context; ids, or text in any script, need fewer even if escaped
BODY_BYTES_FLOOR = 2**20  # so that a model with a short context can get many messages or prompts
IMAGES_BYTES_MAX = 32 * 2**20  # of a conversation with images; Anthropic's limit
BODY_SECONDS_MAX = 60.0


def body_bytes_max(facts: ModelFacts) -> int:
    """Return the limit on a body's bytes. A larger body takes more memory and time to read and validate.

    The limit follows from the model's context. If the task's bodies may have many inputs, the limit allows a context
    for each input, up to the task's `inputs_bytes_max`. Conversations with images have a limit of their own. A model
    without tokens has no context, so only `inputs_bytes_max` counts.
    """
    of_task: TaskPaths = registry.load(facts.task, "serving")
    if not facts.vocab_size:
        return max(BODY_BYTES_FLOOR, of_task.inputs_bytes_max)
    context = BODY_BYTES_PER_TOKEN * facts.max_model_len
    images = 0 if facts.image_place is None else IMAGES_BYTES_MAX
    return max(BODY_BYTES_FLOOR, images, context, min(of_task.inputs_bytes_max, context * INPUTS_MAX))


async def read_body(request: Request, max_bytes: int, held: Held) -> bytes:
    """Return the whole body, decompressed. Raises InvalidRequest."""
    encoding = request.headers.get("content-encoding")
    if (is_compressed := is_gzip(encoding)) is None:
        message = f"the body has Content-Encoding {encoding!r}; send it in gzip, or uncompressed"
        raise InvalidRequest(message, code=ErrorCode.ENCODED_BODY)
    gunzip = Gunzip() if is_compressed else None
    declared = request.headers.get("content-length", "0")
    message = f"the body is longer than {max_bytes} bytes, the most that this model needs"
    too_large = InvalidRequest(message, code=ErrorCode.REQUEST_TOO_LARGE)
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS_MAX):
            async for arrived in request.stream():
                for piece in (arrived,) if gunzip is None else gunzip.feed(arrived):
                    body += piece
                    held.grow(len(piece))
                    if len(body) > max_bytes:
                        raise too_large
                    if gunzip is not None:
                        await asyncio.sleep(0)  # lets the event loop serve other requests
        if gunzip is not None:
            gunzip.end()
    except BadGzip as error:
        raise InvalidRequest(f"the body cannot be read: {error}") from None
    except TimeoutError:
        message = f"the body did not arrive within {BODY_SECONDS_MAX:g} s"
        raise InvalidRequest(message, code=ErrorCode.BODY_TOO_SLOW) from None
    except ClientDisconnect:
        raise InvalidRequest("the connection ended before the body was complete") from None  # for the log only
    return bytes(body)


def timeout_seconds(request: Request, longest: float) -> float:
    """Return the request's timeout in seconds: its header's value, at most `longest`. Raises InvalidRequest."""
    value = request.headers.get(REQUEST_TIMEOUT_HEADER)
    if value is None:
        return longest
    try:
        return min(parse_timeout_seconds(value), longest)
    except ValueError as error:
        raise InvalidRequest(str(error), param=REQUEST_TIMEOUT_HEADER) from None


def json_length(request: Request) -> int | None:
    """Return how many bytes of the body are JSON if binary data follow; None if all are. Raises InvalidRequest."""
    value = request.headers.get(JSON_LENGTH_HEADER)
    if value is None:
        return None
    if not re.fullmatch("[0-9]{1,12}", value):
        raise InvalidRequest(f"{JSON_LENGTH_HEADER} must be a number of bytes", param=JSON_LENGTH_HEADER)
    return int(value)


def request_level(request: Request) -> int | None:
    """Return the priority level that a gateway set for this request; None without one. Raises InvalidRequest."""
    value = request.headers.get(LEVEL_HEADER)
    try:
        return None if value is None else parse_level(value)
    except ValueError as error:
        raise InvalidRequest(str(error), param=LEVEL_HEADER) from None
