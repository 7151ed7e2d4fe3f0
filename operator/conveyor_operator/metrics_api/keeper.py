"""Maintains the metrics API: the certificate in the chart's Secret, and the registration as two APIServices.

Runs next to Kopf as one task, started by `process`. It watches objects by name, so a role with `resourceNames` is
enough. While nothing has to change, it makes no calls. InferenceServices report `metrics_api` in a condition.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

from conveyor_api import names
from conveyor_operator.cluster import Cluster, Object
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import API_SERVICE, DEPLOYMENT, NAMESPACE, SECRET, Key, ObjectKind
from conveyor_operator.loop.workers import backoff_seconds
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api import certificates
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.metrics_api.certificates import DropOld, Issue, Keep
from conveyor_operator.metrics_api.following import follow, remember
from conveyor_operator.metrics_api.registrar import Registrar
from conveyor_operator.metrics_api.registration import (
    API_SERVICES,
    Register,
    Registration,
    Seen,
    Wait,
    Withdraw,
    describe_owner,
)
from conveyor_operator.metrics_api.server import BUNDLE_KEY, CERTIFICATE_KEY, PRIVATE_KEY, decode, read_serving

logger = logging.getLogger(__name__)

_OLD_AUTHORITIES = 2  # two may be in use if a rotation begins before the previous one ends
_LONGEST_SLEEP = timedelta(hours=6)  # so that a clock that is set forward is noticed; waking up makes no call
_PROBE_PERIOD = timedelta(seconds=5)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class MetricsApiKeeper:
    """on_change: called when `metrics_api` changes. now: the clock."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: Metrics,
        system_namespace: str,
        cluster_domain: str,
        on_change: Callable[[], None],
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._namespace = system_namespace
        self._on_change = on_change
        self._now = now
        host = f"{names.METRICS_SERVICE}.{system_namespace}.svc"
        self._hosts = (host, f"{host}.{cluster_domain}")
        self._found: dict[ObjectKind, Object | None] = {}
        self._api_services: dict[str, Object | None] = {}
        self._registration = Registration()
        self._registrar = Registrar(cluster, system_namespace, self._api_services)
        self._changed = asyncio.Event()
        self.metrics_api = MetricsApi()
        """The current state of custom.metrics.k8s.io."""

    async def run(self) -> None:
        """Maintain the metrics API until cancelled."""
        followed: list[tuple[ObjectKind, str, Callable[[Object | None], None]]] = [
            (kind, name, partial(self._find, kind))
            for kind, name in (
                (SECRET, names.METRICS_TLS_SECRET),
                (DEPLOYMENT, names.METRICS_SERVICE),
                (NAMESPACE, self._namespace),
            )
        ]
        followed += [(API_SERVICE, name, partial(self._find_api_service, name)) for name in API_SERVICES]
        async with asyncio.TaskGroup() as tasks:
            for kind, name, on_change in followed:
                namespace = self._namespace if kind.namespaced else ""
                watch = follow(self._cluster, Key(kind, namespace, name), on_change)
                tasks.create_task(watch, name=f"follow {kind.kind} {name}")
            tasks.create_task(self._keep(), name="keep the metrics API")

    def _find(self, kind: ObjectKind, found: Object | None) -> None:
        self._found[kind] = found
        self._changed.set()

    def _find_api_service(self, name: str, found: Object | None) -> None:
        lost = self._api_services.get(name)
        if found is None and lost is not None and not self._registrar.has_withdrawn(name, lost):
            self._registration.record_loss(self._now())
        self._api_services[name] = found
        self._changed.set()

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
                logger.warning("event=metrics_api_failed status=%d error=%s", error.status, error.message)
            await _wait(self._changed, delay)
            if failures:
                await asyncio.sleep(backoff_seconds(1))  # this task's own writes may have ended the wait

    async def step(self) -> datetime:
        """Do the next step, once all objects are known. Returns when to check again."""
        far = self._now() + _LONGEST_SLEEP
        if len(self._found) < 3 or len(self._api_services) < len(API_SERVICES):
            return far
        plan = self._plan()
        if isinstance(plan, Withdraw):
            await self._registrar.withdraw(plan.why)
            return self._now()
        await self._registrar.release()
        if isinstance(plan, Wait):
            self._report(plan.why)
        renew_at = await self._keep_certificate()
        if isinstance(plan, Register):
            return min(renew_at, await self._register(plan.until or far))
        return min(renew_at, plan.until or far)

    # The registration

    def _look(self) -> Seen:
        return Seen(self._namespace, self._api_services, self._found[DEPLOYMENT], self._found[NAMESPACE])

    def _plan(self) -> Register | Withdraw | Wait:
        return self._registration.plan(self._look(), self._now())

    async def _register(self, until: datetime) -> datetime:
        serving = read_serving(self._found[SECRET] or {})
        if self._look().ours:
            if serving is not None:
                await self._registrar.announce(serving.bundle)
            self._report("")
            return until
        fault = (
            "the metrics server has no certificate yet"
            if serving is None
            else await self._registrar.register(serving.bundle)
        )
        self._report(fault)
        return self._now() + _PROBE_PERIOD if fault else self._now()  # the next plan waits for the API server's check

    def _report(self, missing: str) -> None:
        """Update `metrics_api`. `missing`: why no server provides the group; "" if one does."""
        metrics_api = MetricsApi(missing=missing, registered=not missing)
        for name, found in self._look().foreign.items():
            metrics_api = MetricsApi(describe_owner(found), name)
        if metrics_api != self.metrics_api:
            self.metrics_api = metrics_api
            logger.info("event=metrics_api state=%s", missing or "registered")
            self._on_change()

    # The certificate

    async def _keep_certificate(self) -> datetime:
        """Issue, rotate or keep the certificate. Returns when to check again."""
        deployment = self._found[DEPLOYMENT]
        if self._found[SECRET] is None and deployment is not None:  # Helm deletes the Deployment first
            await self._make_secret(deployment["metadata"])
        while (secret := self._found[SECRET]) is not None:
            serving = read_serving(secret)
            match certificates.plan_certificate(serving, self._hosts, self._now()):
                case Issue(reason):
                    await self._issue(secret, reason)
                case DropOld(bundle):
                    logger.info("event=old_authority_dropped")
                    await self._write_secret(secret, {BUNDLE_KEY: bundle})
                case Keep(until):
                    assert serving is not None, "an incomplete Secret is never kept"
                    self._metrics.certificate_expiry.set(serving.expires_at.timestamp())
                    return until
        return self._now() + _LONGEST_SLEEP

    async def _make_secret(self, deployment: Object) -> None:
        """Create the chart's Secret after somebody deleted it, because new metrics pods cannot start without it.

        Server-side apply lets RBAC restrict creation to the Secret's name. deployment: the metadata of the metrics
        server's Deployment, whose marks of Helm the Secret gets, so that it belongs to the same release.
        """
        logger.warning("event=certificate_secret_missing consequence=created_again")
        labels, annotations = deployment.get("labels") or {}, deployment.get("annotations") or {}
        metadata = {
            "name": names.METRICS_TLS_SECRET,
            "namespace": self._namespace,
            "labels": {key: text for key, text in labels.items() if key == names.MANAGED_BY_LABEL},
            "annotations": {key: text for key, text in annotations.items() if key.startswith("meta.helm.sh/")},
        }
        body = {"apiVersion": SECRET.api_version, "kind": SECRET.kind, "metadata": metadata, "type": "Opaque"}
        await remember(self._found, SECRET, self._cluster.apply(SECRET, body, names.FIELD_MANAGER))

    async def _issue(self, secret: Object, reason: str) -> None:
        """Issue a certificate.

        The old authorities stay in the bundle, because the server uses the old pair until the kubelet updates the
        Secret's files.
        """
        logger.info("event=certificate_issued because=%s", reason)
        new = certificates.issue(self._hosts, self._now())
        bundle = b"".join([new.bundle, *self._find_old_authorities(secret)])
        if self._look().ours:
            await self._registrar.announce(bundle)
        await self._write_secret(secret, {CERTIFICATE_KEY: new.certificate, PRIVATE_KEY: new.key, BUNDLE_KEY: bundle})

    def _find_old_authorities(self, secret: Object) -> list[bytes]:
        """Return the newest authorities in the Secret.

        If the APIServices have others, somebody replaced or emptied the Secret. The server then still uses one of the
        oldest ones in the APIServices, because newer ones were never served.
        """
        found = certificates.read_authorities(decode(secret, BUNDLE_KEY))
        bundles = [base64.b64decode(ours["spec"].get("caBundle") or "") for ours in self._look().ours.values()]
        announced = next(filter(None, map(certificates.read_authorities, bundles)), [])
        if found and (not announced or found[0] in announced):
            return found[:_OLD_AUTHORITIES]
        return [*found[:1], *announced[-_OLD_AUTHORITIES:]]

    async def _write_secret(self, secret: Object, data: dict[str, bytes]) -> None:
        patch = {
            # A concurrent change makes this fail with a Conflict; the next step starts from the new state.
            "metadata": {"resourceVersion": secret["metadata"]["resourceVersion"]},
            "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
        }
        write = self._cluster.merge(SECRET, self._namespace, names.METRICS_TLS_SECRET, patch, names.FIELD_MANAGER)
        await remember(self._found, SECRET, write)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
