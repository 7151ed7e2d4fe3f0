"""Sends one request and measures the times of its answer. Used by `open_loop`.

The sizes of answers and events are limited, so that no server can fill the memory of a load generator.
"""

import re
import time
from array import array
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import aiohttp
import msgspec

from conveyor_load.requests import Target, build_body
from conveyor_load.traces import Arrival

_MAX_EVENT_BYTES: Final = 1 << 20
_MAX_ANSWER_BYTES: Final = 64 << 20
_CALIBRATION_WORDS: Final = (8, 40)


class SendError(Exception):
    """A service's answer is not as expected. `lasts`: a later request would get the same answer."""

    def __init__(self, message: str, *, lasts: bool) -> None:
        super().__init__(message)
        self.lasts = lasts


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    text: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


class _Answer(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


@dataclass(slots=True)
class Answer:
    """The times of one request, in seconds of one clock. `due`: when it should have been sent.

    gaps: the seconds between the events of a stream. problem: why the answer is not complete; "" if it is complete.
    """

    due: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    gaps: "array[float]" = field(default_factory=lambda: array("f"))
    problem: str = ""

    @property
    def ttft_seconds(self) -> float:
        """Time to the first token from `due`, not from `sent`, so that a client that sends late hides no delay."""
        return self.first - self.due

    @property
    def latency_seconds(self) -> float:
        return self.last - self.due

    @property
    def itl_seconds(self) -> float:
        """Mean time for each output token after the first one."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


async def send(session: aiohttp.ClientSession, target: Target, arrival: Arrival, answer: Answer, seed: int) -> None:
    """Send a request and fill `answer`. Any failure but a cancellation is stored in `answer.problem`."""
    body = build_body(target, arrival, Random(seed))
    answer.sent = time.monotonic()
    try:
        headers = {"Content-Type": "application/json", **target.headers}
        async with session.post(target.endpoint, data=body, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                answer.problem = _describe_refusal(response.status, await _read(response, _MAX_EVENT_BYTES))
            elif target.streams:
                await _read_stream(response, answer)
            else:
                answered = msgspec.json.decode(await _read(response, _MAX_ANSWER_BYTES), type=_Answer)
                answer.first = answer.last = time.monotonic()
                answer.prompt_tokens = answered.usage.prompt_tokens
    except TimeoutError:
        answer.problem = "no whole answer in time"
    except (aiohttp.ClientError, OSError) as error:
        answer.problem = f"connection failed: {type(error).__name__}"
    except (msgspec.MsgspecError, _TooLong) as error:
        answer.problem = f"unreadable answer: {error}"[:200]


class _TooLong(ValueError):
    """An answer has more bytes than a valid answer could have."""


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            raise _TooLong(f"more than {most} bytes")
    return bytes(body)


def _describe_refusal(status: int, body: bytes) -> str:
    """Return the status with the code of an OpenAI error, so that equal errors are counted together."""
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.MsgspecError, LookupError, TypeError):
        code = None
    return f"HTTP {status} {code}"[:80] if isinstance(code, str) else f"HTTP {status}"


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    decoder, pending, is_done = msgspec.json.Decoder(_Event), bytearray(), False
    async for piece in response.content.iter_any():
        now = time.monotonic()
        pending += piece
        *events, rest = pending.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                is_done = True
            elif event.startswith(b"data:"):
                _take(decoder.decode(data), now, answer)
        pending = bytearray(rest)
        if len(pending) > _MAX_EVENT_BYTES:
            raise _TooLong(f"an event of more than {_MAX_EVENT_BYTES} bytes")
    if not is_done and not answer.problem:
        answer.problem = "stream ended early"


def _take(event: _Event, now: float, answer: Answer) -> None:
    if event.error is not None:
        answer.problem = "error in the stream"
    if event.usage is not None:
        answer.prompt_tokens, answer.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    if event.choices:
        if not answer.first:
            answer.first = now
        else:
            answer.gaps.append(now - answer.last)
        answer.last = now


async def calibrate(session: aiohttp.ClientSession, target: Target) -> Target:
    """Measure the target's tokens per word with two short requests. Returns the updated target. Raises SendError."""
    tokens = []
    for words in _CALIBRATION_WORDS:
        answer = Answer(time.monotonic())
        await send(session, replace(target, tokens_per_word=1.0, extra_tokens=0.0), Arrival(0, words, 1), answer, words)
        if answer.problem:
            message = f"{target.endpoint} does not answer a request of {words} words: {answer.problem}"
            raise SendError(message, lasts=re.match(r"HTTP 4(?!04|29)", answer.problem) is not None)
        if not answer.prompt_tokens:
            raise SendError(f"{target.endpoint} does not report usage.prompt_tokens", lasts=True)
        tokens.append(answer.prompt_tokens)
    (few, many), (low, high) = _CALIBRATION_WORDS, tokens
    per_word = max(0.25, (high - low) / (many - few))
    return replace(target, tokens_per_word=per_word, extra_tokens=max(0.0, low - few * per_word))
