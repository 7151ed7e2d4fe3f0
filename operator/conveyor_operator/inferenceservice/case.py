"""The state of one InferenceService during one reconcile: the desired objects and the observed objects.

`resource` creates it and `loop.reconcile` drives it. All decisions are made by pure modules, which it calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_operator.activity.adapter_states import Counts
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.desired import Desired
from conveyor_operator.inferenceservice.differences import AUTOSCALERS, find_differences, find_kedas_autoscaler
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.naming import NameOf
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.plan import plan
from conveyor_operator.inferenceservice.replica_sets import without_label
from conveyor_operator.inferenceservice.rollout import find_claims
from conveyor_operator.inferenceservice.situation import Situation, read_former
from conveyor_operator.inferenceservice.status import Written, build_status
from conveyor_operator.kinds import CLAIM, DEPLOYMENT, REPLICA_SET, SCALED_OBJECT
from conveyor_operator.loop.child import Child, ChildId, id_of
from conveyor_operator.loop.differences import find_contested, hash_applied
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Step
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.served_names.answer import NameAnswer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Inputs from other parts of the operator, read at the start of the reconcile."""

    metrics_api: MetricsApi
    activity: Activity
    serves_keda: bool | None
    """None if it is not known yet, or if the service does not use KEDA."""
    find_name: Callable[[], NameAnswer]
    """Called when the status is written. By then, a new service's name is usually claimed."""
    adapters: Counts | None = None
    """What engines have made of the adapters; None if it is not known."""


class ServiceCase:
    """A `loop.resource.Case`. `url`: the URL for clients. `previous`: the status before this reconcile.

    `desire` builds the desired children from the observed ones and from a pod template to restore. It is called again
    if the case has read claims or such a template.
    """

    def __init__(
        self,
        service: InferenceService,
        desire: Callable[[Observed, Object | None], Desired],
        observed: Observed,
        memory: ServiceMemory,
        snapshot: Snapshot,
        url: str,
        previous: Object,
    ) -> None:
        self._service = service
        self._desire = desire
        self._desired = desired = desire(observed, None)
        self._observed = observed
        self._memory = memory
        self._snapshot = snapshot
        self._url = url
        self._previous = previous
        self._deployment: ChildId = (DEPLOYMENT.kind, names.engine_name(service.name))
        # Read the Deployment if no watch has reported it. If it belongs to another owner, it must get no autoscaler.
        self.stale = {self._deployment} - observed.children.keys()
        if kedas := find_kedas_autoscaler(desired, observed):
            self.stale |= {(SCALED_OBJECT.kind, kedas.name)} - observed.children.keys()  # to find its owner
        if observed.deployment is not None and observed.deployment.generation < memory.generation:
            self.stale.add(self._deployment)  # otherwise replicas would be planned from an old generation
        self._modes: dict[str, tuple[str, ...]] | None = None
        if self._begins_rollout:
            self._modes = {}
            self.stale |= {(CLAIM.kind, name) for name in find_claims(service.spec)}
        if desired.verdict.cause is not None:
            self.stale.add((REPLICA_SET.kind, desired.verdict.replica_set))

    @property
    def children(self) -> Mapping[ChildId, Child]:
        return self._observed.children

    @property
    def _begins_rollout(self) -> bool:
        """Whether a rollout begins or runs for whose pod template no claims were read."""
        live, wanted = self._observed.deployment, self._desired.template_hash
        settled = live is not None and live.template_hash == wanted and live.rolled_out
        return not settled and self._memory.claims_read_for != wanted

    def plan(self, now: datetime) -> list[Step]:
        if self._modes is not None:  # all claims were read
            self._memory.claim_modes, self._memory.claims_read_for = self._modes, self._desired.template_hash
            self._desired, self._modes = self._desire(self._observed, None), None
        return plan(self._desired, self._observed, self._memory, self._snapshot.activity, now)

    def see(self, child: Object) -> None:
        if child["kind"] == REPLICA_SET.kind:
            self._desired = self._desire(self._observed, without_label(child["spec"]["template"]))
            return
        if child["kind"] == CLAIM.kind and self._modes is not None:
            self._modes[child["metadata"]["name"]] = tuple((child.get("status") or {}).get("accessModes") or ())
        before, self._observed = self._observed.deployment, self._observed.with_child(child)
        if id_of(child) == self._deployment:
            self._memory.generation = int(child["metadata"]["generation"])
            self._memory.see_template(before, self._observed.deployment)

    def lose(self, id: ChildId) -> None:
        self._observed = self._observed.without_child(id)
        if id[0] in AUTOSCALERS:
            self.stale.add(self._deployment)  # the HPA may just have scaled it

    def build_status(self, now: datetime) -> Object:
        memory, found = self._memory, find_differences(self._desired, self._observed, self._memory)
        situation = Situation(
            self._service.spec,
            self._observed,
            (*found.obstacles, *find_contested(memory)),
            self._snapshot.metrics_api,
            now=now,
            activity=self._snapshot.activity,
            former=read_former(self._previous),
            template_generation=memory.template_generation or 0,
            start_seconds=max(memory.pod_starts.seconds, default=0) if memory.pod_starts else 0,
            prewarming=found.prewarming,
            podless_job=found.name_podless_job(now),
            serves_keda=self._snapshot.serves_keda,
            rolled_back=found.rolled_back,
            checks=self._desired.check_job is not None,
            keeps_template=found.checking,
            removes_first=self._desired.rollout.because,
            name=NameOf(self._service.key, self._service.served_model_name, self._snapshot.find_name()),
        )
        starts = memory.pod_starts
        wanted = {id_of(body) for body in found.wanted}
        applied = hash_applied({id: each for id, each in memory.applied.items() if id in wanted})
        written = Written(
            self._url,
            self._desired.effective,
            applied,
            starts.last if starts else None,
            self._desired.starting_replicas,
            self._desired.starting_until,
            self._snapshot.adapters,
        )
        return build_status(self._service, situation, written, self._previous, now)
