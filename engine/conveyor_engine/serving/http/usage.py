"""Reports to a gateway what each of its requests has used. Clients do not see the reports.

A gateway sets a unique key for each request (`X-Engine-Usage`). The response then has the report in a header. A
stream also has the final report after its last event, where the gateway removes it. If the client leaves earlier, the
gateway sends `GET /usage`. Called by `app`, `engine_response` and `generated`.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from conveyor_engine.serving.bill import Bill
from conveyor_protocol.request_headers import USAGE_HEADER, USAGE_MARK
from conveyor_protocol.usage import UsedTokens

ENDED_MAX: Final = 1024  # kept reports of requests that have ended; gateways fetch them immediately
_NO_TOKENS: Final = UsedTokens(0, 0, 0)
_SCOPE_KEY: Final = "conveyor.usage"
_KEY: Final = re.compile(r"[\x21-\x7e]{1,64}")


class Report:
    """The report of one request. `count` returns the current numbers of tokens, and the final ones after `end`."""

    def __init__(self) -> None:
        self.count: Callable[[], UsedTokens] = lambda: _NO_TOKENS
        self.bill: Bill | None = None  # None: nothing was sent to the engine process
        self.error = ""  # that ended the stream, unless it is the client's
        self._ended = asyncio.Event()

    def read(self) -> UsedTokens:
        """Return the report. It is final if the engine process has ended all that was sent to it."""
        used = self.count()
        if self.error:
            used = msgspec.structs.replace(used, error=self.error)
        if self.bill is None:
            return used
        if not self.bill.is_settled:
            return msgspec.structs.replace(used, is_final=False)
        return msgspec.structs.replace(used, receipt=self.bill.sum_up())

    def encode(self) -> bytes:
        return msgspec.json.encode(self.read())

    def end(self) -> None:
        """Keep the final numbers, and drop the reference to the response."""
        used = self.count()
        self.count = lambda: used
        self._ended.set()

    async def wait(self) -> None:
        """Return when the report is final, or a few seconds after the end of the answer."""
        await self._ended.wait()
        if self.bill is not None:
            await self.bill.wait()


class UsageReports:
    """The reports of open requests, and of the last `ENDED_MAX` that have ended."""

    def __init__(self) -> None:
        self._open: dict[str, Report] = {}
        self._ended: dict[str, Report] = {}

    @contextmanager
    def reporting(self, scope: MutableMapping[str, Any]) -> Iterator[Report | None]:
        """Yield a report for the request of an ASGI scope; None if the request has no key.

        `find_report` finds the report in the scope.
        """
        name = USAGE_HEADER.lower().encode()
        key = next((value.decode("latin-1") for each, value in scope["headers"] if each == name), "")
        if not _KEY.fullmatch(key):
            yield None
            return
        report = self._open[key] = scope[_SCOPE_KEY] = Report()
        try:
            yield report
        finally:
            report.end()
            self._open.pop(key, None)
            self._ended[key] = report
            if len(self._ended) > ENDED_MAX:
                del self._ended[next(iter(self._ended))]

    def find(self, key: str) -> Report | None:
        return self._open.get(key) or self._ended.get(key)


def find_report(scope: MutableMapping[str, Any]) -> Report | None:
    report: Report | None = scope.get(_SCOPE_KEY)
    return report


def build_last_words(report: Report | None) -> bytes:
    """Return the bytes after a stream's last event: a report, which the gateway removes, or b"" without one."""
    return b"" if report is None else USAGE_MARK + report.encode()
