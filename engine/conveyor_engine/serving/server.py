"""`serve`: the HTTP server and the engine process from start to exit code. Called by `__main__`.

After SIGTERM, /readyz fails and open requests get drain_timeout_seconds to finish; then the process exits with 0. A
second SIGTERM (or SIGINT) ends open requests at once. If the engine hangs, the first signal already ends them. If the
engine dies, every open request gets an error, and the exit code is 1.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError, Unavailable
from conveyor_engine.registry import load_about
from conveyor_engine.serving.adapter_file import AdapterFile
from conveyor_engine.serving.engine_client import EngineClient
from conveyor_engine.serving.engine_process import ENGINE_PROGRAM, Death
from conveyor_engine.serving.http.app import build_app
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.callers import Callers
from conveyor_engine.serving.http.connection import Connection
from conveyor_engine.serving.http.memory import Memory
from conveyor_engine.serving.http.request_spans import RequestSpans
from conveyor_engine.serving.http.usage import UsageReports
from conveyor_engine.serving.media import MediaFetcher
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.preparing.pool import WorkerPool
from conveyor_engine.serving.preparing.process import ForkServer
from conveyor_process.listening import BACKLOG, Acceptor, allow_open_files, close_port, listen
from conveyor_process.serving_certificate import ServingCertificate
from conveyor_process.settings import SettingsError
from conveyor_process.spans import build_tracer

if TYPE_CHECKING:
    from conveyor_process.otlp import Tracer

_FLUSH_SECONDS = 5.0  # for the last bytes to reach their clients
_STUCK_LOOK_SECONDS = 1.0  # during a drain: the time between two checks whether the engine hangs
_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, and with this project's acceptor of connections."""

    def __init__(self, config: uvicorn.Config, certificate: ServingCertificate | None) -> None:
        super().__init__(config)
        self._certificate = certificate
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn without a socket, then listen on `sockets`."""
        await super().startup([])
        protocol = functools.partial(
            Connection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        tls = {} if self._certificate is None else self._certificate.options
        self._acceptors.append(Acceptor(sockets or [], protocol, **tls))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            await close_port(acceptor)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def serve(config: EngineConfig, fork_server: ForkServer, engine_program: str = ENGINE_PROGRAM) -> Death | None:
    """Run until a signal arrives, the fork server ends or the engine dies. Return why the engine died, or None.

    Raises ConfigError if it cannot listen on the port, or cannot load its certificate or its callers.
    """
    allow_open_files()
    model = fork_server.model
    certificate = _load_certificate(config)
    callers = Callers(Path(config.callers_file)) if config.callers_file else None
    listeners = _listen(config.host, config.port)
    metrics = EngineMetrics(model.name, load_about(config.task).cost_unit, model.adapters)
    engine = EngineClient(config, metrics.observe_step, engine_program)
    metrics.snapshot.num_waiting = lambda: engine.num_waiting
    metrics.snapshot.facts = lambda: engine.facts
    metrics.snapshot.start_seconds = lambda: engine.start_seconds
    stopping = _catch_signals()
    workers = WorkerPool(fork_server, stopping.begun.set)
    path = config.adapters_file
    adapters = AdapterFile(Path(path), model.adapters, engine, config.adapters_folder) if path else None
    media, created = MediaFetcher(config.media_hosts), int(time.time())
    tracer, spans = _build_tracer(), None
    if tracer is not None:
        spans = RequestSpans(tracer, model.name)
        metrics.snapshot.num_lost_spans = lambda: tracer.num_lost
    state = AppState(
        config, model, engine, metrics, workers, media, Memory(), UsageReports(), created, adapters, callers, spans
    )
    server = _Server(
        uvicorn.Config(
            build_app(state), http=Connection, loop="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_keep_alive=75, backlog=BACKLOG,
        ),
        certificate,
    )  # fmt: skip
    await workers.start()
    await engine.start()
    gc.freeze()  # exclude loaded objects from collections, which would pause every stream for 0.1 s
    following = [asyncio.create_task(each.follow()) for each in (certificate, adapters, callers) if each is not None]
    serving = asyncio.create_task(server.serve(listeners))
    served = asyncio.Event()
    serving.add_done_callback(lambda _: served.set())
    _log.info("event=listening host=%s port=%d model=%s", config.host, listeners[0].getsockname()[1], model.name)
    try:
        await _until_stopped(engine, server, served, stopping, config.drain_timeout_seconds)
        await serving
    finally:
        for task in following:
            task.cancel()
        for listener in listeners:
            listener.close()
        await engine.stop()
        await workers.stop()
        if tracer is not None:
            tracer.shut_down()
    return engine.death


def _load_certificate(config: EngineConfig) -> ServingCertificate | None:
    """Return the certificate of the port; None without TLS. Raises ConfigError."""
    try:
        return ServingCertificate(Path(config.tls_folder)) if config.tls_folder else None
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _build_tracer() -> "Tracer | None":
    """Return the tracer; None if no collector is configured. Raises ConfigError."""
    try:
        return build_tracer("conveyor-engine")
    except SettingsError as error:
        raise ConfigError(str(error)) from error


def _listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets. Raises ConfigError."""
    try:
        return listen(host, port)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host or 'all addresses'} port {port}: {error.strerror}") from error


class _Stopping:
    """The signals that end this process: the first one starts the drain, the second one ends the drain."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.forced = asyncio.Event()

    def on_signal(self, name: str) -> None:
        _log.info("event=signal name=%s", name)
        (self.forced if self.begun.is_set() else self.begun).set()


def _catch_signals() -> _Stopping:
    stopping = _Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.on_signal, number.name)
    return stopping


async def _until_stopped(
    engine: EngineClient, server: _Server, served: asyncio.Event, stopping: _Stopping, drain_seconds: float
) -> None:
    """Wait for a signal, the engine's death or the server's end. Then drain if a signal came, and close connections."""
    if await _first(stopping.begun, engine.dead, served) is stopping.begun:
        await _drain(engine, server, served, stopping, drain_seconds)
    server.should_exit = True
    await _first(served, timeout_seconds=_FLUSH_SECONDS)
    for connection in list(server.server_state.connections):
        connection.transport.abort()


async def _drain(
    engine: EngineClient, server: _Server, served: asyncio.Event, stopping: _Stopping, drain_seconds: float
) -> None:
    """Wait until every client has its response.

    After the time-out, after a second signal, or if the engine hangs, fail the requests that are still open.
    """
    _log.info("event=draining open=%d timeout_seconds=%g", engine.num_open, drain_seconds)
    end = time.monotonic() + drain_seconds
    engine.drain()
    with _watching(engine) as stuck:
        first = await _first(engine.idle, stopping.forced, stuck, engine.dead, served, timeout_seconds=drain_seconds)
    if first is engine.idle:
        server.should_exit = True  # only slow readers remain
        await _first(served, stopping.forced, timeout_seconds=max(0.0, end - time.monotonic()))
    elif first in (None, stopping.forced, stuck):
        _log.warning("event=drain_ended_early open=%d engine_stuck=%s", engine.num_open, str(first is stuck).lower())
        engine.fail_all(Unavailable("the engine is going away and ended this request; send it again"))
    _log.info("event=drained")


@contextlib.contextmanager
def _watching(engine: EngineClient) -> Iterator[asyncio.Event]:
    """Return an event that is set when the engine hangs."""
    stuck = asyncio.Event()

    async def watch() -> None:
        while engine.is_alive:  # noqa: ASYNC110  silence sets no event
            await asyncio.sleep(_STUCK_LOOK_SECONDS)
        stuck.set()

    watching = asyncio.create_task(watch())
    try:
        yield stuck
    finally:
        watching.cancel()


async def _first(*events: asyncio.Event, timeout_seconds: float | None = None) -> asyncio.Event | None:
    """Return the event that is set first (the earlier argument, if several are), or None after the timeout."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    return next((event for event in events if event.is_set()), None)
