"""Builds the parts and runs them until SIGTERM. Called by `__main__` and, with a stop event, by tests.

At the start, the server answers probes immediately, and follows the watches and the certificate files. The HTTPS port
opens when the serving certificate and the front proxy's authority are known. Any task that fails ends the process.
"""

import asyncio
import logging
import signal

import aiohttp
from kubernetes.aio.client import ApiClient

from conveyor_http.server import AppRunner, open_port
from conveyor_kube.gateways import gateway_slices
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection, WatchState, connect, watch_collection
from conveyor_kube.watched_list import WatchedList
from conveyor_metrics import auth
from conveyor_metrics.app import build_admin_app, build_api_app
from conveyor_metrics.certificates import Certificates
from conveyor_metrics.errors import InvalidTrust
from conveyor_metrics.listener import Listener
from conveyor_metrics.settings import Settings
from conveyor_metrics.source import GatewaySource
from conveyor_process.listening import allow_open_files, close_port

logger = logging.getLogger(__name__)

_MAX_ADMIN_CONNECTIONS = 256  # from the kubelet, Prometheus and KEDA


class MetricsServer:
    """All parts of the process, for one call of `run`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = False
        self._slices = gateway_slices(settings.system_namespace)
        self._slices_watch = WatchState(self._slices.name)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Returns after every accepted request was answered."""
        settings = self._settings
        async with (
            connect(settings.kubeconfig) as client,
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        ):
            source = self._source = GatewaySource(session, settings.gateway_timeout_seconds, self._slices_watch)
            self._certificates = Certificates(settings.certificate_folder)
            self._listener = Listener(settings.host, settings.https_port, lambda trust: build_api_app(source, trust))
            admin = AppRunner(build_admin_app(source, self._missing), _MAX_ADMIN_CONNECTIONS)
            await admin.setup()
            accepting = open_port(admin, settings.host, settings.admin_port)
            try:
                await self._work(client, stop)
            finally:
                await close_port(accepting)
                await admin.cleanup()

    async def _work(self, client: ApiClient, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._follow_trust(client)),
                tasks.create_task(
                    watch_collection(client, self._slices, WatchedList(self._source.set_slices), self._slices_watch)
                ),
                tasks.create_task(self._listener.serve(self._certificates.follow())),
            ]
            await stop.wait()
            self._stopping = True
            for task in running:
                task.cancel()

    async def _follow_trust(self, client: ApiClient) -> None:
        name = f"metadata.name={auth.CONFIG_MAP_NAME}"
        config_map = Collection(
            "", "v1", "configmaps", auth.CONFIG_MAP_NAMESPACE, field_selector=name, shape=auth.ConfigMapBody
        )
        await watch_collection(client, config_map, WatchedList(self._on_trust), WatchState(config_map.name))

    def _on_trust(self, config_maps: list[Json]) -> None:
        """Update the trust. If the new ConfigMap is invalid, the last valid trust is kept."""
        try:
            trust = auth.parse_trust((config_maps[0].get("data") or {}) if config_maps else {})
        except InvalidTrust as error:
            logger.error("event=trust_unreadable error=%s", error)
            return
        self._certificates.set_trust(trust)

    def _missing(self) -> list[str]:
        reasons = {
            "shutdown": self._stopping,
            "the front proxy authority": self._certificates.trust is None,
            "the serving certificate": self._listener.port is None,
            "the gateways' EndpointSlices": self._source.gateways is None,
        }
        return [reason for reason, applies in reasons.items() if applies]


async def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    allow_open_files()
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await MetricsServer(settings).run(stop)
