"""One InferenceService, brought to what its spec says: the operator's one straight line.

parse -> observe -> build -> plan -> apply -> status. Called by `workers` with a key, never with an event: it looks at
what is there and does what is missing, so it may be called at any time, and stopped at any point.

What it remembers between calls only saves work: which apply led to which child (so that an unchanged child costs no
call), when the pod template changed, and what `report` told. Nothing of it is needed to be right.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from conveyor_api import names
from conveyor_api.conditions import Reason
from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError, Refused
from conveyor_operator.inferenceservice.image import choose_engine_image
from conveyor_operator.inferenceservice.kinds import BY_NAME, INFERENCE_SERVICE
from conveyor_operator.inferenceservice.manifests import Choices, Object, Owner, build_children
from conveyor_operator.inferenceservice.manifests.deployment import with_replicas
from conveyor_operator.inferenceservice.observed import hash_of, observe_child
from conveyor_operator.inferenceservice.plan import (
    Applied,
    Apply,
    Delete,
    Obstacle,
    is_restored,
    plan_applies,
    plan_early_removals,
    plan_removals,
    without_aimless_autoscaler,
)
from conveyor_operator.inferenceservice.replicas import Hold, plan_hold, plan_replicas
from conveyor_operator.inferenceservice.situation import Situation
from conveyor_operator.inferenceservice.status import Written, build_invalid_status, build_status
from conveyor_operator.inferenceservice.work import Memory, Work
from conveyor_operator.kinds import CLAIM, DEPLOYMENT
from conveyor_operator.loop.report import Reporter
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.workers import Key
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.settings import Settings

logger = logging.getLogger(__name__)

_POD_NEEDS = ("ServiceAccount", "PersistentVolumeClaim", "ConfigMap")


class Reconciler:
    """`reconcile` is the whole interface; `metrics_api` tells who serves custom.metrics.k8s.io."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        settings: Settings,
        metrics_api: Callable[[], MetricsApi],
    ) -> None:
        self._cluster = cluster
        self._reporter = Reporter(cluster)
        self._store = store
        self._settings = settings
        self._metrics_api = metrics_api
        self._memories: dict[Key, Memory] = {}

    async def reconcile(self, key: Key) -> bool:
        """True when all is as it should be; False to be called again later. Raises ApiError."""
        # Read anew each time: specs of any number and size need not be kept.
        body = await self._cluster.get(INFERENCE_SERVICE, *key) if self._store.uid(key) else None
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._memories.pop(key, None)  # the children go with their owner
            return True
        memory = self._recall(key, body)
        try:
            service = InferenceService.parse(body)
        except InvalidResource as error:
            await self._write_invalid(body, str(error))
            return True
        work = self._begin(key, body, service, memory)
        try:
            await self._bring_about(work)
        except ApiError as error:
            # A first failure is tried again at once; a second is written to the status, if a call more can help.
            if memory.failing and not error.wants_silence:
                await self._write_status(body, work)
            memory.failing = True
            raise
        memory.failing = False
        await self._write_status(body, work)
        return not work.obstacles

    def _begin(self, key: Key, body: Object, service: InferenceService, memory: Memory) -> Work:
        owner = Owner(service.namespace, service.name, service.metadata.uid)
        observed, default = self._store.observe(key), self._settings.engine_image
        image = choose_engine_image(owner, service.spec, default, observed.deployment)
        if memory.template_generation is None:
            memory.see_template(None, observed.deployment)
        former = (body.get("status") or {}).get("desiredReplicas")
        return Work(service, owner, observed, image, memory, former if isinstance(former, int) else 0)

    async def _bring_about(self, work: Work) -> None:
        """Children as the spec wants them. Every failed call is an obstacle; all but a refused apply also raise."""
        spec, owner = work.service.spec, work.owner
        settings = self._settings
        choices = Choices(work.image, settings.gateway_host, _choose_access_mode(work), settings.network)
        desired = build_children(owner, spec, choices)
        await self._look_up_unknown(work, desired)
        if work.is_behind:
            await self._look_up(work, DEPLOYMENT.kind, names.engine_name(owner.name))
        desired = without_aimless_autoscaler(owner, desired, work.observed)
        autoscaled = work.observed.autoscaler is not None
        for removal in plan_early_removals(owner, desired, work.observed):
            await self._delete(work, removal)
            await self._look_up(work, DEPLOYMENT.kind, names.engine_name(owner.name))  # the HPA's last word
        replicas = plan_replicas(spec, work.observed.deployment, autoscaled)
        desired = [
            with_replicas(child, replicas.count, replicas.held) if child["kind"] == DEPLOYMENT.kind else child
            for child in desired
        ]
        plan = plan_applies(owner, desired, work.observed, work.memory.applied)
        work.obstacles.extend(plan.obstacles)
        for apply in plan.applies:
            await self._apply(work, apply)
        if not work.obstacles:
            for removal in plan_removals(owner, desired, work.observed):
                await self._delete(work, removal)

    async def _look_up_unknown(self, work: Work, desired: list[Object]) -> None:
        """A name that no labelled object of ours has may still be taken: look before applying over it."""
        for child in desired:
            kind, name = child["kind"], child["metadata"]["name"]
            if (kind, name) not in work.observed.children:
                await self._look_up(work, kind, name)

    async def _look_up(self, work: Work, kind: str, name: str) -> None:
        with _told_as_obstacle(work, kind, name):
            found = await self._cluster.get(BY_NAME[kind], work.owner.namespace, name)
        if found is not None:
            work.see(found)

    async def _apply(self, work: Work, apply: Apply) -> None:
        """One child; a refusal is an obstacle, and the Deployment waits for what its pods need."""
        kind, name = apply.id
        if kind == DEPLOYMENT.kind and any(obstacle.kind in _POD_NEEDS for obstacle in work.obstacles):
            return
        logger.info("apply key=%s kind=%s name=%s reason=%s", work.service.key, *apply.id, apply.reason)
        with contextlib.suppress(Refused), _told_as_obstacle(work, kind, name):
            former, before = work.memory.applied.pop(apply.id, None), work.observed
            if kind == DEPLOYMENT.kind:
                await self._hold_replicas(work)
            found = await self._cluster.apply(BY_NAME[kind], apply.body, names.FIELD_MANAGER)
            work.see(found)
            applied = Applied(hash_of(apply.body), observe_child(found).fingerprint)
            work.memory.applied[apply.id] = applied
            if is_restored(apply, before, former, applied):
                work.restored[apply.id] = apply.id not in before.children
            if kind == DEPLOYMENT.kind:
                await self._hold_replicas(work)

    async def _hold_replicas(self, work: Work) -> None:
        """Keep the number of replicas while the field changes hands."""
        hold: Hold | None = plan_hold(work.service.spec, work.observed.deployment, work.former_replicas)
        if hold is None:
            return
        body = {
            "apiVersion": DEPLOYMENT.api_version,
            "kind": DEPLOYMENT.kind,
            "metadata": {"name": names.engine_name(work.owner.name), "namespace": work.owner.namespace},
            "spec": {"replicas": hold.count},
        }
        logger.info("hold replicas key=%s count=%s", work.service.key, hold.count)
        found = await self._cluster.apply(DEPLOYMENT, body, names.REPLICAS_FIELD_MANAGER, force=hold.force)
        work.see(found)

    async def _delete(self, work: Work, removal: Delete) -> None:
        logger.info("delete key=%s kind=%s name=%s", work.service.key, removal.kind, removal.name)
        with _told_as_obstacle(work, removal.kind, removal.name):
            await self._cluster.delete(BY_NAME[removal.kind], work.owner.namespace, removal.name, removal.uid)
        work.observed = work.observed.without_child(removal.kind, removal.name)
        work.memory.applied.pop((removal.kind, removal.name), None)

    async def _write_status(self, body: Object, work: Work) -> None:
        service, memory = work.service, work.memory
        url = self._settings.service_url(service.namespace, service.name)
        situation = Situation(
            service.spec, work.observed, tuple(work.obstacles), self._metrics_api(), memory.template_generation or 0
        )
        previous = body.get("status") or {}
        status = build_status(service, situation, Written(url, work.image), previous, datetime.now(UTC))
        await self._reporter.write(body, status)
        for child, deleted in work.restored.items():
            await self._reporter.tell_restored(body, memory.reported, child, deleted)

    async def _write_invalid(self, body: Object, message: str) -> None:
        previous = body.get("status") or {}
        status = build_invalid_status(message, int(body["metadata"]["generation"]), previous, datetime.now(UTC))
        await self._reporter.write(body, status)

    def _recall(self, key: Key, body: Object) -> Memory:
        uid = str(body["metadata"]["uid"])
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = Memory(uid)
        return memory


@contextlib.contextmanager
def _told_as_obstacle(work: Work, kind: str, name: str) -> Iterator[None]:
    """An ApiError within, in the API's own words; it is raised all the same."""
    try:
        yield
    except ApiError as error:
        temporary, message = not isinstance(error, Refused), f"{kind} {name}: {error.message}"
        work.obstacles.append(Obstacle(kind, name, Reason.CHILD_REFUSED, message, temporary))
        raise


def _choose_access_mode(work: Work) -> str:
    """Of the claim that Conveyor makes. Pods on several nodes need to share it; it cannot change once it is there."""
    live = work.observed.children.get((CLAIM.kind, names.model_claim_name(work.owner.name)))
    if live is not None and live.access_mode:
        return live.access_mode
    spec = work.service.spec
    most = spec.autoscaling.max_replicas if spec.autoscaling is not None and spec.is_autoscaled else spec.replicas
    return "ReadWriteOnce" if most <= 1 and spec.rollout.max_surge in (0, "0%") else "ReadWriteMany"
