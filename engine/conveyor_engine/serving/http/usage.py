"""What requests have used, for the gateway that sent them, out of their clients' sight.

A gateway gives each request a key of its own (`X-Engine-Usage`). Then a whole answer and an error carry the report as a
header, and a stream carries it behind its last event, which the gateway takes away. If the client has left before
that, the gateway asks at `GET /usage`. Called by `app`, `engine_response` and `generated`.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from conveyor_protocol.request_headers import USAGE_HEADER, USAGE_MARK

ENDED_MAX: Final = 1024  # reports of requests that have ended; a gateway asks at once
_SCOPE_KEY: Final = "conveyor.usage"
_KEY: Final = re.compile(r"[\x21-\x7e]{1,64}")


class UsedTokens(msgspec.Struct, frozen=True):
    """Of one request. A prompt counts once, whatever `n` is, and only if it was computed."""

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt's, found in the prefix cache
    completion_tokens: int = 0


class Report:
    """Of one request, at any time: `count` is asked until the request ends."""

    def __init__(self) -> None:
        self.count: Callable[[], UsedTokens] = UsedTokens
        self.ended = asyncio.Event()

    def encode(self) -> bytes:
        return msgspec.json.encode(self.count())

    def end(self) -> None:
        """Keeps the numbers alone."""
        used = self.count()
        self.count = lambda: used
        self.ended.set()


class UsageReports:
    """Those of requests that are open, and of the latest that have ended."""

    def __init__(self) -> None:
        self._open: dict[str, Report] = {}
        self._ended: dict[str, Report] = {}

    @contextmanager
    def reporting(self, scope: MutableMapping[str, Any]) -> Iterator[Report | None]:
        """For the request of an ASGI scope, if its gateway has given it a key. `find_report` finds it there."""
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
    """What a stream ends with, behind its last event: nothing, or a report that its gateway takes away."""
    return b"" if report is None else USAGE_MARK + report.encode()
