"""Puts the parts together and runs them until SIGTERM. Called by `__main__` and, with a stop event, by tests.

Order of a start: probes answer at once; the watches and the certificate files are followed; the HTTPS port opens when
the serving certificate and the front proxy's authority are there. Any task that fails ends the process.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from conveyor_metrics import auth
from conveyor_metrics.app import build_api_app, build_health_app
from conveyor_metrics.certificates import Certificates
from conveyor_metrics.errors import InvalidTrust, SettingsError
from conveyor_metrics.listener import Listener
from conveyor_metrics.settings import Settings
from conveyor_metrics.source import GatewaySource, Json
from conveyor_metrics.watch import watch_objects

logger = logging.getLogger(__name__)


class MetricsServer:
    """The whole process, for one `run`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set; returns after every accepted request was answered."""
        settings = self._settings
        async with (
            connect(settings.kubeconfig) as client,
            aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        ):
            source = self._source = GatewaySource(session, settings.gateway_timeout_seconds)
            self._certificates = Certificates(settings.certificate_folder)
            self._listener = Listener(settings.host, settings.https_port, lambda trust: build_api_app(source, trust))
            health = web.AppRunner(build_health_app(self._missing), access_log=None)
            await health.setup()
            try:
                await web.TCPSite(health, settings.host or None, settings.health_port).start()
                await self._work(client, stop)
            finally:
                await health.cleanup()

    async def _work(self, client: ApiClient, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._watch_trust(client)),
                tasks.create_task(self._watch_gateways(client)),
                tasks.create_task(self._listener.serve(self._certificates.follow())),
            ]
            await stop.wait()
            self._stopping = True
            for task in running:
                task.cancel()

    async def _watch_trust(self, client: ApiClient) -> None:
        path = f"/api/v1/namespaces/{auth.CONFIG_MAP_NAMESPACE}/configmaps"
        await watch_objects(client, path, {"fieldSelector": f"metadata.name={auth.CONFIG_MAP_NAME}"}, self._on_trust)

    async def _watch_gateways(self, client: ApiClient) -> None:
        settings = self._settings
        path = f"/apis/discovery.k8s.io/v1/namespaces/{settings.namespace}/endpointslices"
        selector = f"kubernetes.io/service-name={settings.gateway_service}"
        await watch_objects(client, path, {"labelSelector": selector}, self._source.set_slices)

    def _on_trust(self, config_maps: list[Json]) -> None:
        """An authority that cannot be read is never replaced by none: what was trusted last stays."""
        try:
            trust = auth.parse_trust((config_maps[0].get("data") or {}) if config_maps else {})
        except InvalidTrust as error:
            logger.error("%s", error)
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
    """Runs until SIGTERM or SIGINT."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await MetricsServer(settings).run(stop)


@contextlib.asynccontextmanager
async def connect(kubeconfig: str) -> AsyncIterator[ApiClient]:
    """A client of the API server: of `kubeconfig`, else of the pod, else of $KUBECONFIG or ~/.kube/config."""
    configuration = Configuration()
    try:
        if not kubeconfig and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            await config.load_kube_config(kubeconfig or None, client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise SettingsError(f"no Kubernetes to talk to: {error}; set --kubeconfig") from error
    async with ApiClient(configuration) as client:
        yield client
