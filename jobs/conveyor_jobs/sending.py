"""Sends one request of a job once, and tells what its response means. Called by `job`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

import aiohttp
import msgspec

from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_jobs.request import BatchRequest
from conveyor_protocol.request_headers import REQUEST_ID_HEADER

MAX_ANSWER_BYTES: Final = 32 << 20
_MAX_CODE: Final = 100  # characters, because logs contain codes
_NOT_FOUND: Final = "service_not_found"
_ABSENT_CODES: Final = frozenset((_NOT_FOUND, "service_deleted"))


class Verdict(Enum):
    """What a response means for its request and for the job."""

    RESULT = auto()  # good, or an error that another attempt would get too
    FULL = auto()  # 429, 504 `queue_timeout`: the request waits for room
    ABSENT = auto()  # 503, no connection, 404 of a service that does not exist (yet): the request waits for the service
    BROKEN = auto()  # another status from 500 on, or the connection broke: the request is tried again, but not forever
    REFUSED = auto()  # 401, 403, a redirect, 400 `unknown_class`: probably every request of the job would get it


@dataclass(frozen=True, slots=True)
class Response:
    """What one attempt got. `status`: 0 if there was no whole HTTP response; `error` then says why.

    retry_after: after how many seconds the service wants the request again; 0 if it does not say.
    without_status: the verdict if `status` is 0.
    """

    status: int
    request_id: str = ""
    body: bytes = b""
    error: str = ""
    retry_after: float = 0.0
    without_status: Verdict = Verdict.BROKEN

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def is_of_no_service(self) -> bool:
        """Whether the address is probably wrong: no service has it, or nothing accepts connections there."""
        if not self.status:
            return self.without_status is Verdict.ABSENT
        return self.status == 404 and self.code == _NOT_FOUND

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's format; "" without one."""
        try:
            error = msgspec.json.decode(self.body, type=_Answer).error
            return "" if error is None else str(error.code or "")[:_MAX_CODE]
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return ""

    @property
    def verdict(self) -> Verdict:
        status = self.status
        if not status:
            return self.without_status
        if self.is_good:
            return Verdict.RESULT
        code = self.code
        if status == 429 or (status == 504 and code == "queue_timeout"):
            return Verdict.FULL
        if status == 503 or (status == 404 and code in _ABSENT_CODES):
            return Verdict.ABSENT
        if status in (401, 403) or 300 <= status < 400 or code == "unknown_class":
            return Verdict.REFUSED
        return Verdict.BROKEN if status >= 500 else Verdict.RESULT

    def describe(self) -> str:
        """Return a few words for the log."""
        return self.error or self.code or f"HTTP {self.status}"


class _Error(msgspec.Struct):
    code: str | int | None = None


class _Answer(msgspec.Struct):
    error: _Error | None = None


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends requests to one address, with the same headers, which may change meanwhile."""

    session: aiohttp.ClientSession
    base: str
    headers: Mapping[str, str]

    async def send(self, request: BatchRequest) -> Response:
        """Send the request once."""
        url = self.base + request.path
        try:
            async with self.session.post(url, data=request.body, headers=self.headers, allow_redirects=False) as answer:
                body = bytes(await read_answer(answer.content, MAX_ANSWER_BYTES))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Response(0, error=f"no connection: {error}", without_status=Verdict.ABSENT)
        except AnswerTooLong as error:
            return Response(0, error=str(error), without_status=Verdict.RESULT)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            return Response(0, error=f"{type(error).__name__}: {error}")
        retry_after = answer.headers.get("Retry-After", "")
        seconds = float(retry_after) if re.fullmatch("[0-9]{1,9}", retry_after) else 0.0
        return Response(answer.status, answer.headers.get(REQUEST_ID_HEADER, ""), body, retry_after=seconds)
