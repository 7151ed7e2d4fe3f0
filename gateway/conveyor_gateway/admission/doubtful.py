"""Finds engines that answer although Kubernetes calls no engine of their service ready (panic routing, ADR 158).

If a node stops reporting, Kubernetes marks its pods as not ready, and their engines may still answer. If requests wait
and no engine is ready, the gateway asks the engines that are not terminating. It sends requests to those that answer as
the pod that it means: another pod may have the address now. `server` runs this as one task.

Each half second, a limited number of engines is asked: of services whose engines get requests already, and as many of
the others, so that silent engines do not delay the questions to those with prompts. Namespaces take turns, so that a
tenant with many such services does not delay those of others.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from conveyor_api.names import READINESS_PATH
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import fetch
from conveyor_gateway.engines.transport import PLAIN, Transport
from conveyor_gateway.watching.slices import Doubtful, SliceTable
from conveyor_protocol.request_headers import find_host_name

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.5
_ANSWER_SECONDS: Final = 1.0
ENGINES_A_ROUND: Final = 64
_ENGINES_OF_SERVICE: Final = 16


class DoubtfulEngines:
    """Asks the engines of services that have lost their last ready engine."""

    def __init__(self, slices: SliceTable, queues: Queues, ledger: Ledger, transport: Transport = PLAIN) -> None:
        self._slices, self._queues, self._ledger, self._transport = slices, queues, ledger, transport
        self._looking: set[str] = set()  # services whose engines are asked now
        self._looked: dict[str, float] = {}  # when each doubted service was last asked, by the loop's clock

    async def look_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                self._looked = {service: self._looked.get(service, 0.0) for service in self._slices.doubted}
                idle = self._looked.keys() - self._looking
                trusted = {each for each in idle if self._slices.is_trusted(each)}
                for services in (trusted, {each for each in idle - trusted if self._is_wanted(each)}):
                    for service, doubtful in self._choose_services(services):
                        self._looked[service] = loop.time()
                        group.create_task(self._look(service, doubtful))

    def _is_wanted(self, service: str) -> bool:
        """Return whether requests wait for an engine of the service."""
        return any(queue.queued for _, queue in self._queues.items(service))

    def _choose_services(self, services: Iterable[str]) -> Iterator[tuple[str, dict[str, Doubtful]]]:
        """Yield the services whose turn it is, with the engines to ask."""
        num_asked = 0
        for service in take_turns(services, self._looked):
            doubtful = self._choose_engines(service)
            num_asked += len(doubtful)
            if num_asked > ENGINES_A_ROUND:
                return
            yield service, doubtful

    def _choose_engines(self, service: str) -> dict[str, Doubtful]:
        """Return the engines to ask: those that get requests, and some others, which are not always the same."""
        doubtful, trusted = self._slices.find_doubtful(service), self._slices.engines(service)
        pods = sorted(doubtful, key=lambda pod: (pod not in trusted, random.random()))
        return {pod: doubtful[pod] for pod in pods[:_ENGINES_OF_SERVICE]}

    async def _look(self, service: str, doubtful: Mapping[str, Doubtful]) -> None:
        addresses = [engine.address for engine in doubtful.values()]
        self._looking.add(service)
        try:
            with self._ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
                pages = await fetch(hold, addresses, READINESS_PATH, _ANSWER_SECONDS, transport=self._transport)
        finally:
            self._looking.discard(service)
        answering = {
            pod: engine
            for pod, engine in doubtful.items()
            if (page := pages[engine.address]) is not None
            and page.status == 200
            and page.pod == find_host_name(engine.pod_name)
        }
        was_trusted = self._slices.is_trusted(service)
        self._slices.trust(service, answering)
        if self._slices.is_trusted(service) != was_trusted:
            logger.warning("event=doubtful_engines service=%s answering=%d", service, len(answering))


def take_turns(services: Iterable[str], looked: Mapping[str, float]) -> Iterator[str]:
    """Yield the services in rotation between namespaces, in each namespace those first that were asked longest ago."""
    turns: dict[str, deque[str]] = {}
    for service in sorted(services, key=lambda each: looked[each]):
        turns.setdefault(service.partition("/")[0], deque()).append(service)
    while turns:
        namespace, own = next(iter(turns.items()))
        del turns[namespace]
        yield own.popleft()
        if own:
            turns[namespace] = own  # after all others
