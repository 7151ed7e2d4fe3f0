"""Sends one request of a job until it has a result. Called by `job`.

What a status means:
    200 to 299                           a response
    429, 503, 504 `queue_timeout`, 404   there is no room, or the service does not exist (yet): the request is sent
    `service_not_found`                  again until the job's window ends. No connection to the gateway is the same
    401, 403, 400 `unknown_class`        the key or the class is wrong: all other requests would get the same, so the
                                         job ends
    another below 500                    the request is wrong: its error is its result
    500 and above, a broken connection   the request is sent again, but not more than `max_attempts` times
"""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_jobs.concurrency import Concurrency
from conveyor_jobs.request import BatchRequest
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

MAX_ANSWER_BYTES: Final = 32 << 20
_FIRST_PAUSE_SECONDS: Final = 1.0
_LAST_PAUSE_SECONDS: Final = 60.0
_NOT_NOW_CODES: Final = frozenset(("queue_timeout", "service_not_found", "service_deleted"))


class JobRefused(Exception):
    """The service, or a proxy before it, accepts no request of this job."""


@dataclass(frozen=True, slots=True)
class Response:
    """What a request got. `status`: 0 if there was no HTTP response; `error` then says why."""

    status: int
    request_id: str = ""
    body: bytes = b""
    error: str = ""

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Answer(msgspec.Struct):
    error: _Error | None = None


@dataclass(slots=True)
class Sender:
    """Sends requests to one address. `refused_by` is the last reason why a request has to wait, for the log."""

    session: aiohttp.ClientSession
    base: str
    headers: Mapping[str, str]
    max_attempts: int
    concurrency: Concurrency
    refused_by: str = ""

    async def send(self, request: BatchRequest) -> Response:
        """Return the response to a request. Raises JobRefused."""
        num_failures = num_refusals = 0
        while True:
            sent_at = time.monotonic()
            response, retry_after = await self._post(request)
            if response.status in (401, 403) or _read_code(response.body) == "unknown_class":
                raise JobRefused(f"{request.path} got {response.status}: {response.body[:300]!r}")
            if reason := _find_refusal(response):
                num_refusals += 1
                self.refused_by = reason
                self.concurrency.note_refusal(sent_at, time.monotonic())
                await asyncio.sleep(_choose_pause(num_refusals, retry_after))
                continue
            if response.is_good:
                self.concurrency.note_answer()
            num_failures += 1
            if 0 < response.status < 500 or num_failures == self.max_attempts:
                return response
            await asyncio.sleep(_choose_pause(num_failures, retry_after))

    async def _post(self, request: BatchRequest) -> tuple[Response, float]:
        """Return the response, and after how many seconds the service wants the request again (0: it does not say)."""
        try:
            async with self.session.post(
                self.base + request.path, data=request.body, headers=self.headers, allow_redirects=False
            ) as answer:
                body = bytes(await read_answer(answer.content, MAX_ANSWER_BYTES))
                retry_after = answer.headers.get("Retry-After", "")
                seconds = float(retry_after) if retry_after.isdecimal() else 0.0
                return Response(answer.status, answer.headers.get(REQUEST_ID_HEADER, ""), body), seconds
        except aiohttp.ClientConnectorError as error:
            return Response(503, error=f"no connection: {error}"), 0.0
        except AnswerTooLong as error:
            return Response(0, error=str(error)), 0.0
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return Response(0, error=f"{type(error).__name__}: {error}"), 0.0


def _find_refusal(response: Response) -> str:
    """Return why the request has to be sent later; "" if it has its result."""
    if response.status not in (404, 429, 503, 504):
        return ""
    code = _read_code(response.body)
    if response.status in (404, 504) and code not in _NOT_NOW_CODES:
        return ""
    return response.error or code or f"HTTP {response.status}"


def _read_code(body: bytes) -> str:
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(answer.error.code or "") if answer.error is not None else ""


def _choose_pause(times: int, retry_after: float) -> float:
    """Return the seconds until the next attempt: those that the service names, or longer each time, with jitter."""
    pause = retry_after or _FIRST_PAUSE_SECONDS * 2.0 ** min(times - 1, 10)
    return min(_LAST_PAUSE_SECONDS, pause) * random.uniform(0.75, 1.25)
