"""Finds engines that answer although Kubernetes calls no engine of their service ready (panic routing, ADR 158).

If a node stops reporting, Kubernetes marks its pods as not ready, and their engines may still answer. If requests wait
and no engine is ready, the gateway asks the engines that are not terminating. It sends requests to those that answer as
the pod that it means: another pod may have the address now. `server` runs this as one task.
"""

import asyncio
import logging
import random
from typing import Final

from conveyor_api.names import READINESS_PATH
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.fetching import fetch
from conveyor_gateway.watching.slices import SliceTable
from conveyor_protocol.request_headers import find_host_name

logger = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.5
_ANSWER_SECONDS: Final = 1.0
_SERVICES_AT_ONCE: Final = 20


class DoubtfulEngines:
    """Asks the engines of services that have lost their last ready engine."""

    def __init__(self, slices: SliceTable, queues: Queues, ledger: Ledger) -> None:
        self._slices, self._queues, self._ledger = slices, queues, ledger

    async def look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            wanted = [service for service in self._slices.doubted if self._is_wanted(service)]
            for start in range(0, len(wanted), _SERVICES_AT_ONCE):
                await asyncio.gather(*map(self._look, wanted[start : start + _SERVICES_AT_ONCE]))

    def _is_wanted(self, service: str) -> bool:
        """Return whether requests wait for an engine of the service, or are sent to doubtful ones."""
        return self._slices.is_trusted(service) or any(queue.queued for _, queue in self._queues.items(service))

    async def _look(self, service: str) -> None:
        doubtful = self._slices.find_doubtful(service)
        addresses = [engine.address for engine in doubtful.values()]
        random.shuffle(addresses)  # silent ones may take all the time, and not always the same
        with self._ledger.hold_bytes(Owner(service.partition("/")[0], service, "")) as hold:
            pages = await fetch(hold, addresses, READINESS_PATH, _ANSWER_SECONDS)
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
