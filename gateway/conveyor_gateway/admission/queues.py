"""The queues of all services, kept in step with the catalog.

Made by `server`; told by the catalog what changed; asked by `relaying` for the queue of a service, and by
`answering` and `recording` for what every queue holds.
"""

import asyncio
from collections.abc import Callable

from conveyor_gateway.admission.service_queue import QueueLimits, ServiceQueue
from conveyor_gateway.errors import Code, NotFound
from conveyor_gateway.watching.catalog import Catalog, Service


class Queues:
    """One queue per known service. Everything runs on `loop`. `on_gone` is told of services that were deleted.

    Of what may wait for a service this gateway takes its part of `gateways`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_gone: Callable[[str], None], gateways: int = 1) -> None:
        self._loop = loop
        self._on_gone = on_gone
        self._gateways = gateways
        self._queues: dict[str, ServiceQueue] = {}
        self.catalog = Catalog(self._on_service, self._on_engines)

    def __getitem__(self, key: str) -> ServiceQueue:
        return self._queues[key]

    def items(self, only: str | None = None) -> list[tuple[Service, ServiceQueue]]:
        """Every known service and its queue, by `namespace/name`, or `only` one of them."""
        services = self.catalog.directory.services
        keys = sorted(services) if only is None else [only] * (only in services)
        return [(services[key], self._queues[key]) for key in keys]

    def _on_service(self, key: str) -> None:
        service = self.catalog.directory.services.get(key)
        if service is None:
            if (gone := self._queues.pop(key, None)) is not None:
                gone.close(NotFound(f"the InferenceService {key} was deleted", Code.SERVICE_DELETED))
                self._on_gone(key)
            return
        share = max(1, service.max_queued_requests // self._gateways)
        limits = QueueLimits(share, service.queue_timeout_seconds, service.place_limit)
        if key in self._queues:
            self._queues[key].configure(limits)
        else:
            self._queues[key] = ServiceQueue(limits, self._loop)
            self._on_engines(key)

    def _on_engines(self, key: str) -> None:
        if key in self._queues:
            self._queues[key].set_engines(self.catalog.engines(key))
