"""The InferenceService as the loop knows it: its kinds, its label, and how a reconcile of one begins.

Registered by `process`.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from conveyor_api import names
from conveyor_api.conditions import Reason
from conveyor_api.resource import InferenceService
from conveyor_api.status import InferenceServiceStatus
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice import events
from conveyor_operator.inferenceservice.case import ServiceCase, Told
from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.kinds import CHILDREN, GRANDCHILDREN, INFERENCE_SERVICE, OPTIONAL
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.observed import observe, project
from conveyor_operator.inferenceservice.profiles import read_profiles
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.inferenceservice.status import build_invalid_status
from conveyor_operator.kinds import SCALED_OBJECT, Key, Kind
from conveyor_operator.loop.child import ChildId
from conveyor_operator.loop.events import Event
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.store import Store
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.settings import Settings


class InferenceServices:
    """A `loop.resource.Resource`; `metrics_api` tells who serves custom.metrics.k8s.io, `activity` what requests there
    are for `namespace/name`, `serves` whether the cluster has an optional kind."""

    kind = INFERENCE_SERVICE
    label = names.INFERENCE_SERVICE_LABEL
    children: Sequence[Kind] = CHILDREN
    optional: Sequence[Kind] = OPTIONAL
    grandchildren: Sequence[Kind] = GRANDCHILDREN

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        metrics_api: Callable[[], MetricsApi],
        activity: Callable[[str], Activity],
        serves: Callable[[Kind], bool | None],
    ) -> None:
        self._settings = settings
        self._profiles = read_profiles(settings.profiles)
        self._metrics = metrics
        self._metrics_api = metrics_api
        self._activity = activity
        self._serves = serves

    def project(self, kind: Kind, key: Key, body: Mapping[str, Any]) -> Any:
        return project(kind, key, body)

    def new_memory(self, uid: str) -> ServiceMemory:
        return ServiceMemory(uid)

    def begin(self, body: Object, store: Store, memory: ServiceMemory) -> ServiceCase:
        filled, from_profile = self._profiles.fill(body)
        service, previous = InferenceService.parse(filled), body.get("status") or {}
        observed = observe(store, Key(self.kind, service.namespace, service.name))
        if memory.template_generation is None:
            memory.see_template(None, observed.deployment)
        former = previous.get("desiredReplicas")
        memory.former_replicas = former if isinstance(former, int) else 0
        seen = (observed.autoscaler, observed.scaled_object)
        memory.had_autoscaler = any(each is not None for each in seen) or _was_left_to_others(service.status)
        if memory.pod_starts is None:
            memory.pod_starts = PodStarts(service.status.effective, observed.pods)
        for start in memory.pod_starts.see(observed.pods):
            for part, seconds in start.seconds.items():
                self._metrics.pod_start_seconds.labels(part).observe(seconds)
        told = Told(self._metrics_api(), self._activity(service.key), self._serves(SCALED_OBJECT))
        now = datetime.now(UTC)
        desired = build_desired(
            service, self._settings, observed, memory.pod_starts, now, from_profile, told.serves_keda
        )
        url = self._settings.service_url(service.namespace, service.name)
        return ServiceCase(service, desired, observed, memory, told, url, previous)

    def build_invalid_status(self, body: Object, message: str, now: datetime) -> Object:
        return build_invalid_status(message, int(body["metadata"]["generation"]), body.get("status") or {}, now)

    def find_events(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Event]:
        return events.find_events(before, after)

    def restored(self, child: ChildId, deleted: bool) -> Event:
        return events.restored(*child, deleted)


def _was_left_to_others(status: InferenceServiceStatus) -> bool:
    """Whether the spec that the status is about had an autoscaler that is not ours."""
    return any(condition.reason == Reason.EXTERNAL_AUTOSCALER for condition in status.conditions)
