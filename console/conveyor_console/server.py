"""Builds the parts and runs them until SIGTERM. Called by `__main__`.

Any task that fails ends the process. An exception from a read of the gateways is logged, because pages of hostile
engines are part of it.
"""

import asyncio
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

import aiohttp
from kubernetes.aio.client import ApiClient

from conveyor_console.access import Access
from conveyor_console.app import App
from conveyor_console.gateways import Gateways
from conveyor_console.lookups import Lookups
from conveyor_console.playground.playground import Playground
from conveyor_console.playground.relay import Relay
from conveyor_console.prometheus import Prometheus
from conveyor_console.services import Services, shown_collection
from conveyor_console.settings import Settings
from conveyor_console.state import State
from conveyor_console.usage import Usage
from conveyor_http.server import AppRunner, open_port
from conveyor_kube.authorities import follow_authorities
from conveyor_kube.gateways import gateway_slices
from conveyor_kube.watch import Sink, WatchState, connect, watch_collection
from conveyor_kube.watched_list import WatchedList
from conveyor_process.listening import allow_open_files, close_port

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 256
_SYNC_SECONDS: Final = 0.1


class Console:
    """All parts of the process, for one call of `run`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._collections = [shown_collection(namespace) for namespace in settings.watch_namespaces or ("",)]
        self._slices = gateway_slices(settings.system_namespace)
        self._watches = [WatchState(each.name) for each in (*self._collections, self._slices)]
        self._services = Services()
        self._has_read = False
        file = settings.playground_authorities
        self._authorities_file = str(file) if file is not None and file.exists() else None
        self._authorities = ssl.create_default_context(cafile=self._authorities_file)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        settings = self._settings
        async with (
            connect(settings.kubeconfig) as client,
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        ):
            self._gateways = Gateways(session, settings.read_seconds)
            self._state = State(self._services, self._gateways)
            playground = self._build_playground(session)
            access = Access(client)
            lookups = Lookups(self._gateways, access, Usage(client, settings.system_namespace))
            url = settings.prometheus_url
            prometheus = Prometheus(session, url) if url else None
            app = App(
                client, self._state, self._gateways, access, lookups, prometheus, playground, self._list_missing
            ).build()
            runner = AppRunner(app, _MAX_CONNECTIONS, shutdown_timeout=1)
            await runner.setup()
            accepting = open_port(runner, settings.host, settings.port)
            logger.info("event=serving port=%d", accepting.port)
            try:
                await self._work(client, stop)
            finally:
                await close_port(accepting)
                await runner.cleanup()

    def _build_playground(self, session: aiohttp.ClientSession) -> Playground | None:
        settings = self._settings
        if not settings.playground_url:
            return None
        relay = Relay(session, settings.playground_url.rstrip("/"), self._authorities)
        return Playground(relay, self._gateways, self._state.find_line)

    async def _work(self, client: ApiClient, stop: asyncio.Event) -> None:
        sinks: list[Sink] = [*(self._services for _ in self._collections), WatchedList(self._gateways.set_slices)]
        watched = zip((*self._collections, self._slices), sinks, self._watches, strict=True)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(watch_collection(client, *each)) for each in watched]
            running += [tasks.create_task(self._repeat(read)) for read in (self._read, self._gateways.read_engines)]
            running.append(tasks.create_task(follow_authorities(self._authorities_file, self._authorities)))
            await stop.wait()
            for task in running:
                task.cancel()

    async def _read(self) -> None:
        await self._state.read()
        self._has_read = True

    async def _repeat(self, read: Callable[[], Awaitable[None]]) -> None:
        """Call `read` at the set interval, from the time when all watches have listed their objects."""
        while True:
            is_synced = all(watch.synced for watch in self._watches)
            if is_synced:
                try:
                    await read()
                except Exception:
                    logger.exception("event=read_failed")
            await asyncio.sleep(self._settings.read_seconds if is_synced else _SYNC_SECONDS)

    def _list_missing(self) -> list[str]:
        return [watch.name for watch in self._watches if not watch.synced] or ["the gateways"] * (not self._has_read)


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    allow_open_files()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Console(settings).run(stop)
