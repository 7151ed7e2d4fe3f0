"""Keeps the metrics API trusted: fills the chart's empty Secret with a certificate, and the APIServices' caBundle.

Runs beside Kopf as one task, started by `process`. Watches three objects by name (so a role with `resourceNames`
is enough) and makes no call while they are as they should be. Never touches an APIService of somebody else; it tells
`reconcile`, through `metrics_api`, who that is. What to do is decided in `certificates`.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from conveyor_api import names
from conveyor_operator import certificates
from conveyor_operator.certificates import DropOld, Issue, Keep, Serving
from conveyor_operator.cluster import Cluster, Object
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import API_SERVICE, SECRET
from conveyor_operator.metrics import Metrics
from conveyor_operator.scaling import MetricsApi
from conveyor_operator.workers import backoff_seconds

logger = logging.getLogger(__name__)

API_SERVICES = tuple(f"{version}.{names.METRICS_GROUP}" for version in names.METRICS_VERSIONS)

_CERTIFICATE_KEY, _PRIVATE_KEY, _BUNDLE_KEY = "tls.crt", "tls.key", "ca.crt"
_OLD_AUTHORITIES = 2  # a rotation that was interrupted by another one leaves that many in use
_LONGEST_SLEEP = timedelta(hours=6)  # a clock that is set forward is noticed; waking up costs no call


def _utc_now() -> datetime:
    return datetime.now(UTC)


class MetricsApiKeeper:
    """`on_owner_change` is called when the answer of `metrics_api` changes; `now` is the clock."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: Metrics,
        system_namespace: str,
        cluster_domain: str,
        on_owner_change: Callable[[], None],
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._namespace = system_namespace
        self._on_owner_change = on_owner_change
        self._now = now
        self._hosts = (
            f"{names.METRICS_SERVICE}.{system_namespace}.svc",
            f"{names.METRICS_SERVICE}.{system_namespace}.svc.{cluster_domain}",
        )
        self._secret: Object | None = None
        self._api_services: dict[str, Object | None] = {}
        self._changed = asyncio.Event()
        self.metrics_api = MetricsApi()
        """Who serves custom.metrics.k8s.io, as far as it is known."""

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_secret(), name="follow the metrics server's Secret")
            for name in API_SERVICES:
                tasks.create_task(self._follow_api_service(name), name=f"follow APIService {name}")
            tasks.create_task(self._keep(), name="keep the metrics server's certificate")

    async def _follow_secret(self) -> None:
        async for found in _follow(self._cluster, SECRET, self._namespace, names.METRICS_TLS_SECRET):
            self._secret = found
            self._changed.set()

    async def _follow_api_service(self, name: str) -> None:
        async for found in _follow(self._cluster, API_SERVICE, None, name):
            self._api_services[name] = found
            self._judge_owner()
            self._changed.set()

    def _judge_owner(self) -> None:
        present = [(name, found) for name, found in self._api_services.items() if found is not None]
        foreign = [(name, found) for name, found in present if not self._is_ours(found)]
        owner = MetricsApi()
        if foreign:
            name, found = foreign[0]
            service = found["spec"].get("service")
            owner = MetricsApi(
                f"{service['namespace']}/{service['name']}" if service else "the API server itself", name
            )
        if owner != self.metrics_api:
            self.metrics_api = owner
            logger.info("metrics API owner=%s", owner.owner or "conveyor or nobody")
            self._on_owner_change()

    def _is_ours(self, api_service: Object) -> bool:
        service = api_service["spec"].get("service") or {}
        return (service.get("namespace"), service.get("name")) == (self._namespace, names.METRICS_SERVICE)

    async def _keep(self) -> None:
        failures = 0
        while True:
            self._changed.clear()
            try:
                until = await self.step()
                failures, delay = 0, min(until - self._now(), _LONGEST_SLEEP).total_seconds()
            except ApiError as error:
                failures += 1
                delay = backoff_seconds(failures)
                logger.warning("metrics certificate failed status=%s error=%r", error.status, error.message)
            await _wait(self._changed, delay)
            if failures:
                await asyncio.sleep(backoff_seconds(1))  # what fails is not hurried by what it changes

    async def step(self) -> datetime:
        """Does what the state asks for, once all of it is known; returns when to look again."""
        while self._secret is not None and len(self._api_services) == len(API_SERVICES):
            serving = read_serving(self._secret)
            action = certificates.plan_certificate(serving, self._hosts, self._now())
            match action:
                case Issue():
                    await self._issue(action.reason)
                case DropOld(bundle):
                    logger.info("metrics certificate: dropping the old authority")
                    await self._write_secret({_BUNDLE_KEY: bundle})
                case Keep(until):
                    assert serving is not None, "an incomplete Secret is never kept"
                    self._metrics.certificate_expiry.set(serving.expires_at.timestamp())
                    await self._announce(serving.bundle)
                    return until
        return self._now() + _LONGEST_SLEEP

    async def _issue(self, reason: str) -> None:
        """Announced together with the old authorities: the server has the old pair until the kubelet brings the new."""
        logger.info("metrics certificate: issuing a new one because %s", reason)
        new = certificates.issue(self._hosts, self._now())
        bundle = b"".join([new.bundle, *self._find_old_authorities()])
        await self._announce(bundle)
        await self._write_secret({_CERTIFICATE_KEY: new.certificate, _PRIVATE_KEY: new.key, _BUNDLE_KEY: bundle})

    def _find_old_authorities(self) -> list[bytes]:
        """The newest of the Secret; of a Secret without any, the oldest announced: newer ones were never served."""
        found = certificates.read_authorities(_decode(self._secret or {}, _BUNDLE_KEY))
        if found:
            return found[:_OLD_AUTHORITIES]
        ours = [found for found in self._api_services.values() if found is not None and self._is_ours(found)]
        bundles = [base64.b64decode(found["spec"].get("caBundle") or "") for found in ours]
        return next(filter(None, map(certificates.read_authorities, bundles)), [])[-_OLD_AUTHORITIES:]

    async def _announce(self, bundle: bytes) -> None:
        wanted = base64.b64encode(bundle).decode()
        for name, found in self._api_services.items():
            if found is None or not self._is_ours(found) or found["spec"].get("caBundle") == wanted:
                continue
            logger.info("metrics certificate: writing the caBundle of APIService %s", name)
            patch = {"spec": {"caBundle": wanted}}
            self._api_services[name] = await self._cluster.merge(API_SERVICE, None, name, patch, names.FIELD_MANAGER)

    async def _write_secret(self, data: dict[str, bytes]) -> None:
        assert self._secret is not None, "only called with a Secret at hand"
        patch = {
            # Somebody else's change in between makes it fail, and the next look starts from there.
            "metadata": {"resourceVersion": self._secret["metadata"]["resourceVersion"]},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        self._secret = await self._cluster.merge(
            SECRET, self._namespace, names.METRICS_TLS_SECRET, patch, names.FIELD_MANAGER
        )


def read_serving(secret: Object) -> Serving | None:
    """The pair in a Secret; None if a part is missing or is no base64."""
    parts = [_decode(secret, key) for key in (_CERTIFICATE_KEY, _PRIVATE_KEY, _BUNDLE_KEY)]
    return Serving(*parts) if all(parts) else None


def _decode(secret: Object, key: str) -> bytes:
    """A value of the Secret; empty if it is missing or no base64."""
    try:
        return base64.b64decode((secret.get("data") or {}).get(key, ""))
    except ValueError:
        return b""


async def _follow(cluster: Cluster, kind: Any, namespace: str | None, name: str) -> Any:
    """`Cluster.follow` that survives failures, with a backoff."""
    failures = 0
    while True:
        try:
            async for found in cluster.follow(kind, namespace, name):
                failures = 0
                yield found
        except ApiError as error:
            failures += 1
            log = logger.warning if failures > 1 else logger.debug
            log("watch failed kind=%s name=%s error=%r", kind.kind, name, error.message)
            await asyncio.sleep(backoff_seconds(failures))


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
