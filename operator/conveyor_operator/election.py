"""Elects one of the release's operators as leader: the holder of the Lease `conveyor-operator`. Used by `process`.

The holder renews the Lease every 5 s. Another operator takes over if it has seen no renewal for 15 s by its own clock,
or if the holder has released the Lease. A holder that cannot renew for 10 s stops, so that no two operators act at
once. Kubernetes' own controllers also use 15 s and 10 s. The rules are the same as in client-go's leaderelection.
docs/adr/0034 explains why no library is used.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, Final

from conveyor_api.names import FIELD_MANAGER, OPERATOR_LEASE
from conveyor_operator.cluster import Cluster, Object
from conveyor_operator.errors import ApiError, Conflict
from conveyor_operator.kinds import LEASE

logger = logging.getLogger(__name__)

LEASE_SECONDS: Final = 15
_DEADLINE_SECONDS: Final = 10.0
_RENEW_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 1.0


class Election:
    """One candidate. It writes its identity into the Lease."""

    def __init__(self, cluster: Cluster, namespace: str, identity: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._identity = identity
        self._seen: Object | None = None  # the last spec of the Lease; `_seen_at`: when this spec was first seen
        self._seen_at = 0.0
        self._other = ""

    @contextlib.asynccontextmanager
    async def led(self, stop: asyncio.Event, on_loss: Callable[[], None]) -> AsyncIterator[bool]:
        """Wait for the Lease, keep it while the body runs, and release it. Yields False if `stop` was set first."""
        if not await self._win(stop):
            yield False
            return
        logger.info("event=leading identity=%s", self._identity)
        keeping = asyncio.create_task(self._keep(on_loss), name="keep the lease")
        try:
            yield True
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])
            await self._release()

    async def _win(self, stop: asyncio.Event) -> bool:
        while not stop.is_set():
            if await self._try():
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK_SECONDS)
        return False

    async def _keep(self, on_loss: Callable[[], None]) -> None:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while True:
            await asyncio.sleep(_RENEW_SECONDS)
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline - began):
                    while not await self._try() and not self._other:
                        await asyncio.sleep(_LOOK_SECONDS)
                        began = time.monotonic()
                    deadline = began + _DEADLINE_SECONDS
            if self._other or time.monotonic() >= deadline:
                logger.error("event=lease_lost holder=%s", self._other or "unknown")
                on_loss()
                return

    async def _try(self) -> bool:
        """Try to acquire or renew the Lease. Returns whether it is held now. The caller retries after a failure."""
        try:
            async with asyncio.timeout(_RENEW_SECONDS):
                return await self._take()
        except (Conflict, TimeoutError):
            return False  # after a Conflict, the next read shows the holder
        except ApiError as error:
            logger.warning("event=lease_failed status=%d error=%s", error.status, error.message)
            return False

    async def _take(self) -> bool:
        lease = await self._cluster.get(LEASE, self._namespace, OPERATOR_LEASE) or await self._make()
        spec = lease.get("spec") or {}
        if spec != self._seen:
            self._seen, self._seen_at = spec, time.monotonic()
        holder = spec.get("holderIdentity") or ""
        is_other = holder not in ("", self._identity)
        if is_other and time.monotonic() < self._seen_at + LEASE_SECONDS:
            if holder != self._other:
                logger.info("event=standing_by leader=%s", holder)
            self._other = holder
            return False
        self._other = ""
        await self._write(lease, self._claim(spec, holder))
        return True

    async def _make(self) -> Object:
        """Create the Lease without a holder. Server-side apply lets RBAC restrict creation to the Lease's name."""
        metadata = {"name": OPERATOR_LEASE, "namespace": self._namespace}
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata}
        return await self._cluster.apply(LEASE, body, FIELD_MANAGER)

    def _claim(self, spec: Object, holder: str) -> Object:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        claim: dict[str, Any] = {"renewTime": now, "leaseDurationSeconds": LEASE_SECONDS}
        if holder != self._identity:
            claim |= {"holderIdentity": self._identity, "acquireTime": now}
            claim["leaseTransitions"] = (spec.get("leaseTransitions") or 0) + 1
        return claim

    async def _write(self, lease: Object, spec: Object) -> None:
        """Write the Lease's spec. Raises Conflict if the Lease has changed since it was read."""
        patch = {"metadata": {"resourceVersion": lease["metadata"]["resourceVersion"]}, "spec": spec}
        await self._cluster.merge(LEASE, self._namespace, OPERATOR_LEASE, patch, FIELD_MANAGER)

    async def _release(self) -> None:
        # Without a release, another operator takes over after LEASE_SECONDS.
        with contextlib.suppress(ApiError, TimeoutError):
            async with asyncio.timeout(_DEADLINE_SECONDS):
                lease = await self._cluster.get(LEASE, self._namespace, OPERATOR_LEASE)
                if lease and (lease.get("spec") or {}).get("holderIdentity") == self._identity:
                    await self._write(lease, {"holderIdentity": ""})
                    logger.info("event=lease_released")
