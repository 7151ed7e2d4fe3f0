"""The queues of all services, one for each service in the catalog.

Built by `server`. The catalog notifies it of changes. `relaying` looks up the queue of a service; `pages` and
`recording` read the state of every queue.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from conveyor_gateway.admission.limits import QueueLimits
from conveyor_gateway.admission.place_queries import PlaceQueries
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.watching.catalog import Catalog, Service

logger = logging.getLogger(__name__)

_SERVICES_A_TURN: Final = 100
# At most one in this many places of a batch, and at least one, is kept for clients with few requests, and those beyond
# the batch.
KEPT_PART: Final = 5


class Queues:
    """One queue for each known service. Everything runs on `loop`.

    `on_gone` is called with each deleted service, `on_class_gone` with each class that was removed from a service.

    Each gateway allows an equal share of the requests that may wait for a service. Until this gateway knows other
    gateways, its share is the whole. `ledger` limits how many requests a namespace may have, queued and at engines
    together.
    """

    def __init__(
        self,
        catalog: Catalog,
        loop: asyncio.AbstractEventLoop,
        engines: EngineSession,
        ledger: Ledger,
        on_gone: Callable[[str], None],
        on_class_gone: Callable[[str, str], None] = lambda service, name: None,
    ) -> None:
        self._catalog = catalog
        self._ledger = ledger
        self._loop = loop
        self._engines = engines
        self._on_gone = on_gone
        self._on_class_gone = on_class_gone
        self.num_gateways = 1  # that share the limits
        self._queues: dict[str, ServiceQueue] = {}
        catalog.subscribe(self._on_service, self._on_engines)

    def __getitem__(self, key: str) -> ServiceQueue:
        return self._queues[key]

    def items(self, only: str | None = None) -> list[tuple[Service, ServiceQueue]]:
        """Return every known service with its queue, or only the service `only` (`namespace/name`)."""
        services = self._catalog.directory.services
        keys = sorted(services) if only is None else [only] * (only in services)
        return [(services[key], self._queues[key]) for key in keys]

    def set_num_gateways(self, count: int) -> None:
        """Set the number of gateways that share the limit. Requests that already wait are kept."""
        before, self.num_gateways = self.num_gateways, max(1, count)
        if self.num_gateways != before:
            self._share_again(iter(list(self._queues)))

    def _share_again(self, keys: Iterator[str]) -> None:
        """Set the new limits of some services. Later turns of the event loop continue with the others."""
        some = list(islice(keys, _SERVICES_A_TURN))
        for key in some:
            self._on_service(key)
        if some:
            self._loop.call_soon(self._share_again, keys)

    def _on_service(self, key: str) -> None:
        service = self._catalog.directory.services.get(key)
        if service is None:
            if (gone := self._queues.pop(key, None)) is not None:
                gone.close(GatewayError("the service was deleted", Code.SERVICE_DELETED))
                self._on_gone(key)
            return
        share = max(1, service.max_queued_requests // self.num_gateways)
        fills = service.window_seconds > 0
        limits = QueueLimits(
            share,
            service.queue_timeout_seconds,
            service.place_limit,
            0 if fills else service.place_limit - service.batch_size,
            0 if fills else max(1, service.batch_size // KEPT_PART),
            fills,
            service.classes,
            self.num_gateways,
        )
        self._log_unreachable(key, share)
        if key in self._queues:
            for name in self._queues[key].limits.classes.names - limits.classes.names:
                self._on_class_gone(key, name)
            self._queues[key].configure(limits)
        else:
            places = PlaceQueries(self._engines, self._ledger, Owner(service.namespace, key, ""))
            self._queues[key] = ServiceQueue(limits, self._loop, places)
            self._on_engines(key)
        self._queues[key].set_start_failure(service.start_failure)

    def _log_unreachable(self, key: str, share: int) -> None:
        """Warn if the queue's share exceeds what this gateway can hold, once for each limit that the owner sets."""
        known, max_held = self._queues.get(key), self._ledger.requests.most_of_namespace
        if share > max_held and (known is None or known.limits.max_queued_requests != share):
            logger.warning(
                "event=queue_limit_unreachable service=%s share=%d max_held=%d consequence=further_requests_get_429 "
                "action=raise_max_connections",
                key, share, max_held,
            )  # fmt: skip

    def _on_engines(self, key: str) -> None:
        if key in self._queues:
            self._queues[key].set_engines(self._catalog.engines(key))
