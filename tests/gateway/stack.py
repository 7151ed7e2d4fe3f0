"""A service behind a running gateway, for tests of the whole gateway."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import aiohttp
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import pauses
from e2e.cluster.definitions import claim_name


class Stack:
    """The service `qwen` in the test's namespace. After each change, waits until the gateway has seen it."""

    def __init__(self, gateway: GatewayProcess, cluster: Cluster) -> None:
        self.gateway = gateway
        self.cluster = cluster
        self.key = f"{cluster.namespace}/qwen"
        self.url = f"{gateway.url}/{self.key}/v1"
        self.completions = f"{self.url}/completions"
        self._num_engines = 0

    async def apply_service(self, **spec: Any) -> None:
        await asyncio.to_thread(self.cluster.apply_service, "qwen", **spec)
        await self._wait_for_watch()

    async def complete_rollout(self) -> None:
        await asyncio.to_thread(self.cluster.complete_rollout, "qwen")
        await self._wait_for_watch()

    async def _wait_for_watch(self) -> None:
        """Wait until the gateway has seen all changes so far."""
        await asyncio.to_thread(self.cluster.apply_service, "later")
        await self.wait(lambda: self._knows("qwen") and self._knows("later"))  # a watch tells of changes in order
        await asyncio.to_thread(self.cluster.delete_service, "later")
        await self.wait(lambda: not self._knows("later"))

    def _knows(self, name: str) -> bool:
        return self.gateway.demand(f"{self.cluster.namespace}/{name}") is not None

    async def claim_name(self, name: str) -> None:
        """Claim the name for the test's namespace, which must have a service that serves it."""
        await asyncio.to_thread(claim_name, self.cluster.api, self.cluster.namespace, name)
        await self.wait(lambda: self.gateway.knows_model(name))

    async def release_name(self, name: str) -> None:
        await asyncio.to_thread(self.cluster.release_name, name)
        await self.wait(lambda: not self.gateway.knows_model(name))

    async def add_engine(self, port: int) -> None:
        self._num_engines += 1
        await asyncio.to_thread(self.cluster.apply_engine, "qwen", own_address(), port)
        await self.wait(lambda: self.num_engines() == self._num_engines)

    async def set_engine_ready(self, port: int, ready: bool) -> None:
        """Change whether an engine is ready. Nothing needs to listen at its port."""
        self._num_engines += 1 if ready else -1
        await asyncio.to_thread(
            self.cluster.apply_engine, "qwen", own_address(), port, ready=ready, serving=True, terminating=not ready
        )
        await self.wait(lambda: self.num_engines() == self._num_engines)

    def num_engines(self) -> float:
        return self.metric("engines")

    def metric(self, name: str, **labels: str) -> float:
        """Return one of this service's series. name: without the gateway's prefix."""
        labels |= {"namespace": self.cluster.namespace, "inference_service": "qwen"}
        return self.gateway.metric(f"conveyor_gateway_{name}", **labels)

    def demand(self) -> dict[str, int]:
        found = self.gateway.demand(self.key)
        assert found is not None, f"{self.key} is not listed"
        return found

    async def wait_demand(self, **counts: int) -> None:
        await self.wait(lambda: counts.items() <= self.demand().items())

    async def wait(self, holds: Callable[[], bool]) -> None:
        """Poll until the condition is true. Polls outside the event loop, on which the test's engines run."""
        deadline, wait = time.monotonic() + 120, pauses()
        while not await asyncio.to_thread(holds):
            assert time.monotonic() < deadline, f"still {self.gateway.admin('/demand')}"
            await asyncio.sleep(next(wait))


async def post(
    http: aiohttp.ClientSession, url: str, body: bytes = b"{}", **headers: str
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Send a request. Returns status, JSON and headers of the answer."""
    data = BytesIO(body) if len(body) > 1 << 20 else body
    async with http.post(
        url, data=data, headers={name.replace("_", "-"): text for name, text in headers.items()}
    ) as got:
        return got.status, json.loads(await got.read()), got.headers


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    """Read a page. Returns status and JSON of the answer."""
    async with http.get(url) as answer:
        return answer.status, json.loads(await answer.read())
