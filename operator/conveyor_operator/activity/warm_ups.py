"""Reads from a gateway how long an engine's warm-up took, once the pod is Ready. Kubernetes does not know this time.

Runs next to Kopf as one task, started by `process`; `inferenceservice` uses it. Each try reads a gateway chosen at
random. A tenant may control the engine, so only a number is accepted. The status and a metric report this number.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from conveyor_api.names import START_PATH
from conveyor_kube.gateways import Gateway, GatewayUnreadable, read_page
from conveyor_protocol.pages import Start

_PAUSES_SECONDS: Final = (0, 1, 2, 4, 8, 16)
"""Pauses before each request, until a gateway answers. Gateways may see that a pod is Ready later than the operator."""
_TIMEOUT_SECONDS: Final = 1.0

ReportWarmUp = Callable[[float | None], object]


@dataclass(frozen=True, slots=True)
class _Question:
    service: str
    pod: str
    report: ReportWarmUp


class WarmUps:
    """mark: called with the `namespace/name` of each service for which a warm-up was reported."""

    def __init__(self, gateways: Callable[[], Sequence[Gateway]], mark: Callable[[str], None]) -> None:
        self._gateways = gateways
        self._mark = mark
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()

    def request(self, service: str, pod: str, report: ReportWarmUp) -> None:
        """Request the warm-up of the engine in the pod with this uid.

        report: called once, with the seconds of the warm-up, or None if no gateway reports it.
        """
        self._questions.put_nowait(_Question(service, pod, report))

    async def run(self) -> None:
        """Send the requests until cancelled."""
        async with (
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while True:
                question = await self._questions.get()
                tasks.create_task(self._answer(session, question), name=f"ask for the warm-up in {question.pod}")

    async def _answer(self, session: aiohttp.ClientSession, question: _Question) -> None:
        page = await self._find(session, question)
        seconds = page.warm_up_seconds if page is not None else None
        question.report(seconds)
        if seconds is not None:
            self._mark(question.service)

    async def _find(self, session: aiohttp.ClientSession, question: _Question) -> Start | None:
        for pause_seconds in _PAUSES_SECONDS:
            await asyncio.sleep(pause_seconds)
            if gateways := self._gateways():
                page = await _read(session, random.choice(gateways), question)
                if page is not None:
                    return page
        return None


async def _read(session: aiohttp.ClientSession, gateway: Gateway, question: _Question) -> Start | None:
    """Return the engine's start, or None if it cannot be read now. `follower` logs faults of the gateway."""
    query = {"service": question.service, "pod": question.pod}
    try:
        page = await read_page(session, gateway, START_PATH, _TIMEOUT_SECONDS, query)
        return None if page is None else msgspec.json.decode(page, type=Start)
    except (GatewayUnreadable, msgspec.DecodeError, RecursionError):
        return None
