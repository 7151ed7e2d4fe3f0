"""The attack `keys`: a tenant has 100,000 APIKeys. A gateway uses 10,000 of a namespace.

They are written to etcd itself, because the API server would take minutes to create them.
"""

import asyncio
import base64
import contextlib
import http.client
import itertools
import json
import socket
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.gateway.keys import make_api_key, make_key
from tests.gateway.process import GatewayProcess

from conveyor_api import names
from conveyor_bench.hostile.bars import NEVER
from conveyor_bench.hostile.gateway.attacks import TENANT, Attack, Stage
from e2e.cluster.api import wait_until

NUM_KEYS: Final = 100_000
_LONGEST_START_SECONDS: Final = 600
_A_WRITE: Final = 100  # etcd accepts 128 in one transaction


class _Etcd(http.client.HTTPConnection):
    """A connection to etcd's JSON gateway on a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))

    def write(self, values: list[tuple[str, str]]) -> None:
        """Write values by key, in one transaction."""
        writes = [{"request_put": {"key": _encode(key), "value": _encode(value)}} for key, value in values]
        self.request("POST", "/v3/kv/txn", json.dumps({"success": writes}))
        with self.getresponse() as answer:
            text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"etcd answers {answer.status}: {text[:200]!r}")


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _build_objects() -> Iterator[tuple[str, str]]:
    """Yield each APIKey as the API server stores it."""
    for number in range(NUM_KEYS):
        body: dict[str, Any] = make_api_key(TENANT, f"key-{number}", make_key(TENANT, number))
        body["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": "2026-11-01T00:00:00Z", "generation": 1}
        yield f"/registry/{names.GROUP}/{names.API_KEY_PLURAL}/{TENANT}/key-{number}", json.dumps(body)


async def keys(stage: Stage) -> None:
    """Create the keys, and wait until the gateway has seen more than it uses. Then start another gateway."""
    etcd, objects, before = _Etcd(stage.etcd), _build_objects(), len(stage.gateway.log)
    while several := list(itertools.islice(objects, _A_WRITE)):
        await asyncio.to_thread(etcd.write, several)
    etcd.close()
    seen = partial(_has_seen_all, stage.gateway)
    await asyncio.to_thread(wait_until, "the keys at the gateway", seen, timeout_seconds=600)
    other, began = GatewayProcess(stage.kubeconfig), time.monotonic()
    try:
        stage.start_seconds = NEVER
        with contextlib.suppress(TimeoutError):
            await asyncio.to_thread(other.start, timeout_seconds=_LONGEST_START_SECONDS)
            stage.start_seconds = time.monotonic() - began
        stage.num_lines = max(map(_count_lines, (other.log, stage.gateway.log[before:])))
    finally:
        other.kill()


def _count_lines(log: list[str]) -> int:
    """Return the number of lines that are not about a request of the other clients."""
    return sum(" event=request " not in line for line in log)


def _has_seen_all(gateway: GatewayProcess) -> bool:
    """Return whether the gateway has seen a thousand keys more than it uses. It counts no more of them."""
    return gateway.metric("conveyor_gateway_unreadable_objects", resource="apikeys") >= 1000


KEYS: Final[dict[str, Attack]] = {"keys": keys}
