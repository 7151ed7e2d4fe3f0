"""The operator's own HTTP server, with /livez, /readyz and /metrics on one port. Started by `process`.

/livez fails only if a reconcile runs for too long. /readyz succeeds once the operator watches, and while it stands by
(another operator leads). On standby only one metric is exported. If the event loop is stuck, nothing answers. This
module does not depend on Kubernetes.
"""

import logging
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from conveyor_api import names
from conveyor_http.server import AppRunner, open_port
from conveyor_operator.metrics import Metrics
from conveyor_process.listening import close_port

logger = logging.getLogger(__name__)

# A reconcile makes about twenty calls, each of which ends within 30 s. A reconcile above this limit counts as stuck.
_STUCK_SECONDS = 300.0
_MAX_CONNECTIONS = 256  # from the kubelet and Prometheus


class Health:
    """The state behind the probes. `process` writes it, `HealthServer` reads it."""

    def __init__(self, longest_run_seconds: Callable[[], float]) -> None:
        self._longest_run_seconds = longest_run_seconds
        self.waiting_for = "starting"
        """What the operator waits for before it watches; empty once it watches."""
        self.missing: set[str] = set()
        """The kinds that the API server has stopped to serve, because their CRDs were deleted."""
        self.leads = True
        """False while another operator holds the Lease and this one stands by."""

    @property
    def obstacle(self) -> str:
        """What keeps the operator from acting; empty if nothing does."""
        return ", ".join(sorted(self.missing)) or self.waiting_for

    def find_fault(self) -> str:
        """Return why the process should be restarted; empty if it should not."""
        running = self._longest_run_seconds()
        return f"a reconcile has been running for {running:.0f} s" if running > _STUCK_SECONDS else ""


class HealthServer:
    """Serves until `stop` is called. After `start`, `port` is the real port, even if the requested port is 0."""

    def __init__(self, health: Health, metrics: Metrics, host: str, port: int) -> None:
        self._health = health
        self._metrics = metrics
        self._host = host
        self.port = port
        app = web.Application()
        app.router.add_get(names.LIVENESS_PATH, self._live)
        app.router.add_get(names.READINESS_PATH, self._ready)
        app.router.add_get(names.PROMETHEUS_PATH, self._prometheus)
        self._runner = AppRunner(app, _MAX_CONNECTIONS, shutdown_timeout=1)

    async def start(self) -> None:
        await self._runner.setup()
        self._accepting = open_port(self._runner, self._host, self.port)
        self.port = self._accepting.port
        logger.info("event=serving admin_port=%d", self.port)

    async def stop(self) -> None:
        await close_port(self._accepting)
        await self._runner.cleanup()

    async def _live(self, request: web.Request) -> web.Response:
        fault = self._health.find_fault()
        if fault:
            return web.Response(status=500, text=f"{fault}\n")
        return web.Response(text=f"alive; waiting for: {self._health.obstacle or 'nothing'}\n")

    async def _ready(self, request: web.Request) -> web.Response:
        if not self._health.leads:
            return web.Response(text="standing by\n")
        waiting_for = self._health.obstacle
        return web.Response(status=503 if waiting_for else 200, text=f"{waiting_for or 'ready'}\n")

    async def _prometheus(self, request: web.Request) -> web.Response:
        metrics, leads = self._metrics, self._health.leads
        metrics.leader.set(leads)
        registry = metrics.registry if leads else metrics.registry.restricted_registry(["conveyor_operator_leader"])
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
