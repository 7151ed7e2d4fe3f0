"""Builds the parts and runs them until SIGTERM. Called by `__main__`.

The shutdown has these steps:
1. /readyz fails immediately. The port accepts connections for drain_delay_seconds more, because kube-proxy and clients
   need time to stop using this address. Every new response announces that its connection closes, so that the client
   sends its next request elsewhere.
2. The port closes. Queued and running requests, and those that arrive on open connections, have drain_timeout_seconds
   to end. A response from before the shutdown did not announce the close. Its client may send another request, so the
   process waits a moment for such requests.
3. Remaining and later requests get a 503.
/demand works until the last request has ended. The watches continue, because queued requests still need engines. A
second signal skips the waits.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Awaitable
from pathlib import Path

from conveyor_api.served_name import root_name
from conveyor_gateway.admission.doubtful import DoubtfulEngines
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.clients import Clients
from conveyor_gateway.engines.fetching import SharedPages
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.engines.transport import EngineTls, Transport
from conveyor_gateway.listening.admin import AdminApp
from conveyor_gateway.listening.cors import Cors
from conveyor_gateway.listening.listener import Listener
from conveyor_gateway.listening.public import PublicApp
from conveyor_gateway.listening.self_check import check_for_ever
from conveyor_gateway.metering.meters import Meters
from conveyor_gateway.proofs import Proofs
from conveyor_gateway.recording.gauges import ServiceGauges, StateCollector
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.recording.record import Recorder
from conveyor_gateway.recording.usage_book import UsageBook
from conveyor_gateway.relaying.bodies import BodyReader
from conveyor_gateway.relaying.deaths import Deaths
from conveyor_gateway.relaying.open_requests import OpenRequests
from conveyor_gateway.relaying.request_life import SharedParts
from conveyor_gateway.routing import OwnHosts
from conveyor_gateway.settings import Settings
from conveyor_gateway.sources import ClusterSource, Source
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.readiness import Readiness
from conveyor_process.listening import allow_open_files
from conveyor_process.serving_certificate import ServingCertificate
from conveyor_process.spans import build_tracer

logger = logging.getLogger(__name__)

_STALE_LOG_SECONDS = 30.0
_FREEZE_POLL_SECONDS = 1.0
_LAST_ANSWERS_SECONDS = 2.0
_NEXT_REQUEST_SECONDS = 1.0  # how long a client may take to send its next request on a connection
_MAX_ADMIN_CONNECTIONS = 128  # from the kubelet, Prometheus, the operator and the metrics servers
# Admin connections, the same number that wait to be accepted, the queries to engines of `/demand`, watches.
_OTHER_OPEN_FILES = 2 * _MAX_ADMIN_CONNECTIONS + 100 + 50


class Server:
    """All parts of the process, for one call of `run`. Must be created inside the event loop."""

    def __init__(self, settings: Settings, max_open_files: int, source: Source) -> None:
        self._settings = settings
        self._source = source
        self.opened = asyncio.Event()  # set when both ports are open
        max_connections = fit_connections(settings.max_connections, max_open_files)
        metrics = Metrics()
        self._tls = None if settings.engine_authorities is None else EngineTls(settings.engine_authorities)
        self._transport = Transport(self._tls)
        self._engines = EngineSession(self._transport)
        ledger = Ledger(settings.max_held_bytes, max(1, max_connections - max_connections // 8))
        self._catalog = catalog = Catalog(settings.access)
        self._queues = queues = Queues(
            catalog,
            asyncio.get_running_loop(),
            self._engines,
            ledger,
            metrics.drop_service,
            metrics.drop_class,
        )
        self._doubtful = DoubtfulEngines(catalog.slices, queues, ledger, self._transport)
        own_name = root_name(settings.system_namespace)
        self._readiness = Readiness(
            source.states,
            are_names_claimed=lambda: catalog.directory.names.find_holder(own_name) is not None,
        )
        catalog.keys.subscribe(metrics.drop_client)
        metrics.gauges = ServiceGauges(queues)
        book = UsageBook()
        self._tracer = build_tracer("conveyor-gateway")
        recorder = Recorder(metrics, catalog.directory, catalog.keys, book, self._tracer)
        metrics.registry.register(StateCollector(catalog, self._readiness, ledger, self._tracer))
        parts = SharedParts(
            catalog.directory,
            queues,
            self._engines,
            BodyReader(settings.max_request_bytes, settings.body_timeout_seconds),
            ledger,
            Meters(settings.limits, lambda: queues.num_gateways),
            recorder,
            self._readiness,
            settings.heartbeat_seconds,
            Deaths(),
            catalog.keys.log,
        )
        self._open_requests = OpenRequests(parts)
        self._certificate = ServingCertificate(Path(settings.tls_folder)) if settings.tls_folder else None
        self._public = self._build_public_port(catalog, metrics, ledger, max_connections)
        admin = AdminApp(catalog, queues, self._readiness, metrics, book, recorder.receipts, ledger, self._transport)
        self._admin = Listener(
            admin.handle, settings.admin_host or settings.host, settings.admin_port, _MAX_ADMIN_CONNECTIONS
        )

    @property
    def admin_port(self) -> int:
        """The actual admin port, also if port 0 was requested. Valid once the ports are open."""
        return self._admin.port

    def _build_public_port(self, catalog: Catalog, metrics: Metrics, ledger: Ledger, max_connections: int) -> Listener:
        settings = self._settings
        cors = Cors(frozenset(settings.allowed_origins))
        clients = Clients(settings.trusted_proxies, settings.client_header)
        public = PublicApp(
            self._open_requests,
            catalog,
            self._readiness,
            metrics,
            OwnHosts(settings.system_namespace, settings.public_hosts),
            ledger,
            clients,
            Proofs(catalog.keys, catalog.issuer),
            SharedPages(ledger, self._transport),
            cors,
            lists_all=settings.root_models == "All",
        )
        keep_alive_seconds = settings.keep_alive_seconds
        where = (settings.host, settings.port, max_connections)
        return Listener(public.handle, *where, cors, clients.find_peer, keep_alive_seconds, self._certificate)

    async def run(self, stop: asyncio.Event, end_now: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain. `end_now` ends the draining."""
        async with contextlib.AsyncExitStack() as stack:
            if self._tracer is not None:
                stack.callback(self._tracer.shut_down)
            stack.push_async_callback(self._engines.close)
            await stack.enter_async_context(self._source.filling(self._catalog, self._queues, self._transport.tokens))
            for listener in (self._admin, self._public):
                await listener.open()
                stack.push_async_callback(listener.close)
            self.opened.set()
            logger.info("event=serving port=%d admin_port=%d", self._public.port, self._admin.port)
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._log_staleness()),
                    tasks.create_task(self._check_public_port()),
                    tasks.create_task(self._freeze_listed()),
                    tasks.create_task(self._doubtful.look_for_ever()),
                ]
                followed = (each for each in (self._certificate, self._tls) if each is not None)
                background += [tasks.create_task(each.follow()) for each in followed]
                await stop.wait()
                await self._drain(end_now)
                for task in background:
                    task.cancel()
        logger.info("event=ended")

    async def _drain(self, end_now: asyncio.Event) -> None:
        self._readiness.draining = True
        delay_seconds, timeout_seconds = self._settings.drain_delay_seconds, self._settings.drain_timeout_seconds
        logger.info("event=draining delay_seconds=%g timeout_seconds=%g", delay_seconds, timeout_seconds)
        await _wait_at_most(delay_seconds, end_now.wait())
        await self._public.stop_accepting()
        ended = asyncio.create_task(self._open_requests.wait_idle(_NEXT_REQUEST_SECONDS))
        ending_now = asyncio.create_task(end_now.wait())
        await asyncio.wait((ended, ending_now), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        ending_now.cancel()
        if not ended.done():
            logger.warning("event=drain_ended_early open=%d", self._open_requests.num_open)
            ended.cancel()
        self._open_requests.stop()  # also for requests that arrive on an open connection before it is closed
        await _wait_at_most(_LAST_ANSWERS_SECONDS, self._open_requests.wait_idle())

    async def _freeze_listed(self) -> None:
        """Exclude the listed services from garbage collections, each of which would pause the loop (ADR 125)."""
        while not self._readiness.synced:  # noqa: ASYNC110
            await asyncio.sleep(_FREEZE_POLL_SECONDS)
        gc.freeze()

    async def _check_public_port(self) -> None:
        def set_answers(answers: bool) -> None:
            if self._readiness.draining:  # the port is about to close
                return
            if answers != self._readiness.answers_clients:
                logger.warning("event=public_port answers=%s", str(answers).lower())
            self._readiness.answers_clients = answers

        serves_tls = self._certificate is not None
        await check_for_ever(self._public.port, self._settings.host, set_answers, serves_tls=serves_tls)

    async def _log_staleness(self) -> None:
        while True:
            await asyncio.sleep(_STALE_LOG_SECONDS)
            for warning in self._readiness.warnings():
                logger.warning("event=stale message=%s", warning)


def fit_connections(wanted: int, max_open_files: int) -> int:
    """Return how many client connections may be open, so that the process always has enough file descriptors.

    For each open client connection, there may be a connection to an engine and a new client that waits to be accepted.
    """
    fitting = max(1, (max_open_files - _OTHER_OPEN_FILES) // 3)
    if fitting < wanted:
        logger.warning(
            "event=few_open_files limit=%d max_connections=%d wanted=%d consequence=fewer_clients_at_a_time",
            max_open_files, fitting, wanted,
        )  # fmt: skip
    return min(wanted, fitting)


async def _wait_at_most(seconds: float, waited: Awaitable[object]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await waited


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    max_open_files = allow_open_files()
    stop, end_now, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        (end_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await Server(settings, max_open_files, ClusterSource(settings)).run(stop, end_now)
