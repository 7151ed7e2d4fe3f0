"""Implements the loop's `Resource` for InferenceServices: their kinds, their label, and the beginning of a reconcile.

Registered by `process`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from conveyor_api import names
from conveyor_api.conditions import Reason
from conveyor_api.resource import InferenceService
from conveyor_api.status import InferenceServiceStatus
from conveyor_kube.issuer import Issuer
from conveyor_operator.activity.adapter_states import Counts
from conveyor_operator.activity.answer import Activity
from conveyor_operator.activity.warm_ups import ReportWarmUp
from conveyor_operator.inferenceservice import events
from conveyor_operator.inferenceservice.case import ServiceCase, Snapshot
from conveyor_operator.inferenceservice.desired import Desired, build_desired
from conveyor_operator.inferenceservice.kinds import CHILDREN, GRANDCHILDREN, INFERENCE_SERVICE, OPTIONAL
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.naming import find_requested_name
from conveyor_operator.inferenceservice.observed import Observed, observe, project
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.inferenceservice.profiles import read_profiles
from conveyor_operator.inferenceservice.series import read_state
from conveyor_operator.inferenceservice.starts import PodStart, PodStarts
from conveyor_operator.inferenceservice.status import build_invalid_status
from conveyor_operator.kinds import SCALED_OBJECT, Key, ObjectKind
from conveyor_operator.loop.child import ChildId
from conveyor_operator.loop.events import Event
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.store import Store
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.served_names.answer import NameAnswer
from conveyor_operator.settings import Settings


class Sources(Protocol):
    """The other parts of the operator, from which a reconcile reads. A `service` is `namespace/name`."""

    def read_metrics_api(self) -> MetricsApi:
        """Return who serves custom.metrics.k8s.io."""
        ...

    def read_activity(self, service: str) -> Activity:
        """Return whether the service has to start from zero or may scale to zero."""
        ...

    def serves(self, kind: ObjectKind) -> bool | None:
        """Return whether the cluster serves an optional kind. Call it only for services that need the kind."""
        ...

    def request_warm_up(self, service: str, pod: str, report: ReportWarmUp) -> None:
        """Request the warm-up time of the engine in the pod with this uid."""
        ...

    def follow_adapters(self, service: str, *, is_pending: bool | None) -> Counts | None:
        """Return what engines have made of the service's adapters; None if it is not known.

        is_pending: whether not all of them are loaded; None: the service has none.
        """
        ...

    def find_name(self, service: str, name: str) -> NameAnswer:
        """Return the state of the claim of the service's name."""
        ...

    def read_issuer(self) -> Issuer | None:
        """Return the issuer of the tokens that engines accept; None if engines answer everyone."""
        ...


class InferenceServices:
    """A `loop.resource.Resource`."""

    kind = INFERENCE_SERVICE
    label = names.INFERENCE_SERVICE_LABEL
    children: Sequence[ObjectKind] = CHILDREN
    optional: Sequence[ObjectKind] = OPTIONAL
    grandchildren: Sequence[ObjectKind] = GRANDCHILDREN

    def __init__(self, settings: Settings, metrics: Metrics, sources: Sources) -> None:
        self._settings = settings
        self._profiles = read_profiles(settings.profiles)
        self._metrics = metrics
        self._sources = sources

    def project(self, kind: ObjectKind, key: Key, body: Mapping[str, Any]) -> Any:
        return find_requested_name(body) if kind == self.kind else project(kind, key, body)

    def new_memory(self, uid: str) -> ServiceMemory:
        return ServiceMemory(uid)

    def begin(self, body: Object, store: Store, memory: ServiceMemory) -> ServiceCase:
        (service, from_profile), previous = self._profiles.parse(body), body.get("status") or {}
        observed = observe(store, Key(self.kind, service.namespace, service.name))
        if memory.pod_starts is None:  # the first reconcile of this operator
            memory.former_hash = service.status.children_hash or ""
        if memory.template_generation is None:
            memory.see_template(None, observed.deployment)
        former = previous.get("desiredReplicas")
        memory.former_replicas = former if isinstance(former, int) else 0
        seen = (observed.autoscaler, observed.scaled_object)
        memory.had_autoscaler = any(each is not None for each in seen) or _was_left_to_others(service.status)
        starts = self._see_starts(service, memory, observed.pods)
        sources = self._sources
        find_name = partial(sources.find_name, service.key, service.served_model_name)
        autoscaling = service.spec.autoscaling
        serves_keda = sources.serves(SCALED_OBJECT) if autoscaling and autoscaling.uses_keda else None
        adapters = self._find_adapters(service, observed.pods)
        snapshot = Snapshot(
            sources.read_metrics_api(), sources.read_activity(service.key), serves_keda, find_name, adapters
        )
        now = datetime.now(UTC)

        def desire(observed: Observed, former_template: Object | None) -> Desired:
            given = (service, self._settings, observed, starts, now, from_profile, snapshot.serves_keda)
            return build_desired(*given, memory.claim_modes, former_template, sources.read_issuer())

        url = self._settings.service_url(service.namespace, service.name)
        return ServiceCase(service, desire, observed, memory, snapshot, url, previous)

    def _find_adapters(self, service: InferenceService, pods: Sequence[PodState]) -> Counts | None:
        if not service.spec.adapters:
            return self._sources.follow_adapters(service.key, is_pending=None)
        changed = service.status.observed_generation != service.metadata.generation
        is_whole = not changed and service.status.ready_adapters == len(service.spec.adapters)
        is_pending = not is_whole and any(pod.ready for pod in pods)
        return self._sources.follow_adapters(service.key, is_pending=is_pending)

    def _see_starts(self, service: InferenceService, memory: ServiceMemory, pods: Sequence[PodState]) -> PodStarts:
        starts = memory.pod_starts
        if starts is None:
            starts = memory.pod_starts = PodStarts(service.status, pods)
            if starts.last is not None:  # the previous operator has already counted it
                self._find_warm_up(service, starts.last, partial(starts.describe_warm_up, starts.last))
        for start in starts.see(pods):
            self._find_warm_up(service, start, partial(self._count, starts, start))
        return starts

    def _find_warm_up(self, service: InferenceService, start: PodStart, report: ReportWarmUp) -> None:
        """Request the time of the engine's warm-up from a gateway, if the engine reports it."""
        if service.spec.runtime == "Conveyor" and "load" in start.seconds:
            self._sources.request_warm_up(service.key, start.uid, report)
        else:
            report(None)

    def _count(self, starts: PodStarts, start: PodStart, warm_up_seconds: float | None) -> None:
        for part, seconds in starts.describe_warm_up(start, warm_up_seconds).seconds.items():
            self._metrics.pod_start_seconds.labels(part).observe(seconds)

    def build_invalid_status(self, body: Object, message: str, now: datetime) -> Object:
        return build_invalid_status(message, int(body["metadata"]["generation"]), body.get("status") or {}, now)

    def expose(self, body: Object, status: Object) -> None:
        metadata = body["metadata"]
        self._metrics.put_service(metadata["namespace"], metadata["name"], read_state(body, status))

    def find_events(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Event]:
        return events.find_events(before, after)

    def restored(self, child: ChildId, deleted: bool) -> Event:
        return events.restored(*child, deleted)


def _was_left_to_others(status: InferenceServiceStatus) -> bool:
    """Return whether the status belongs to a spec with an external autoscaler."""
    return any(condition.reason == Reason.EXTERNAL_AUTOSCALER for condition in status.conditions)
