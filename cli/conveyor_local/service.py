"""One service: its pods, its replicas and its status. Used by `running`, which runs one `Service` for each.

It takes the place of the controllers of a cluster. Decisions are made by the operator's own functions and by
`conveyor_insight.hpa`; this module carries them out, and updates the gateway.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from conveyor_api import names
from conveyor_api.conditions import LASTING_FAILURES, ConditionType
from conveyor_api.resource import InferenceService
from conveyor_api.status import Condition
from conveyor_insight.hpa import Controller, Hpa
from conveyor_local.errors import RunError
from conveyor_local.plans import PodPlanner, Surroundings, adapt, build_all
from conveyor_local.pod import TEMPLATE_LABEL, Pod
from conveyor_local.source import LocalSource
from conveyor_metrics.demand import DemandSum
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from conveyor_operator.inferenceservice.naming import NameOf
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed
from conveyor_operator.inferenceservice.replica_sets import ReplicaSetState
from conveyor_operator.inferenceservice.replicas import may_sleep, plan_zero
from conveyor_operator.inferenceservice.situation import Situation, read_former
from conveyor_operator.inferenceservice.starting import count_starting
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.inferenceservice.status import Written, build_status
from conveyor_operator.served_names.answer import NameAnswer, NameState

_MOST_FIRST_FAILURES: Final = 3  # of a service that has never been ready


@dataclass(frozen=True, slots=True)
class Options:
    """How services are scaled. `report`: shows a line. `url`: the address of the gateway."""

    autoscales: bool
    sync_seconds: float
    url: str
    report: Callable[[str], None]


class Service:
    """A service. `status`: as the operator would write it."""

    def __init__(self, body: Mapping[str, Any], around: Surroundings, options: Options) -> None:
        parsed = InferenceService.parse(body)
        self.service = adapt(parsed, around.machine)
        device = {"engine": {**body["spec"].get("engine", {}), "device": self.service.spec.engine.device}}
        self._body = {**body, "spec": {**body["spec"], **device}}
        self._desired = build_all(parsed)
        self._plan = PodPlanner(parsed, self._desired, around).build_plan()
        self._options = options
        self._pods: list[Pod] = []
        self._ending_pods: set[Pod] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._number = 0
        self._starts = PodStarts()
        self._was_complete = self._was_ready = self._is_ending = False
        self._changed = asyncio.Event()
        spec = self.service.spec
        self.activity = Activity.STEADY
        self.demand: DemandSum | None = None
        self.status: dict[str, Any] = {}
        self._hpa = self._build_hpa()
        self.replicas = 0 if may_sleep(spec) and self._hpa is not None else spec.first_replicas

    @property
    def key(self) -> str:
        return self.service.key

    @property
    def ready_pods(self) -> list[Pod]:
        return [pod for pod in self._pods if pod.is_ready]

    @property
    def pods(self) -> list[Pod]:
        """All pods, also those that are ending."""
        return list(self._pods)

    @property
    def scales(self) -> bool:
        return self._hpa is not None

    @property
    def ready(self) -> Condition:
        """The condition Ready."""
        conditions = [Condition.model_validate(each) for each in self.status["conditions"]]
        return next(each for each in conditions if each.type == ConditionType.READY)

    @property
    def is_ending(self) -> bool:
        return self._is_ending

    @property
    def has_started(self) -> bool:
        """Whether all engines of the start have been ready, or none is wanted."""
        return self._was_complete

    def update_gateway(self, source: LocalSource) -> None:
        """Write the status, and update the gateway."""
        self.status = self._build_status()
        self.service = InferenceService.parse({**self._body, "status": self.status})
        source.put_service({**self._body, "status": self.status})

    async def run(self, source: LocalSource, http: aiohttp.ClientSession) -> None:
        """Keep the wanted number of engines running until cancelled. Raises RunError if none can start."""
        known: set[str] = set()
        while True:
            self._scale(http)
            for pod in self.ready_pods:
                source.put_engine(self.service, pod.name, pod.uid, pod.port)
            ready = {pod.name for pod in self.ready_pods}
            for name in known - ready:
                source.delete_engine(self.service, name)
            known = ready
            self.update_gateway(source)
            self._check_start()
            self._changed.clear()
            await self._changed.wait()

    def decide(self, now: float) -> None:
        """Let the HorizontalPodAutoscaler decide, as its controller does once in each period."""
        if self._hpa is None or self._is_ending:
            return
        demand = self.demand
        values = {
            names.IN_FLIGHT_METRIC: demand.in_flight if demand else None,
            names.QUEUE_DEPTH_METRIC: demand.queue_depth if demand else None,
        }
        if self.replicas:
            self._set_replicas(self._hpa.look(now, self.replicas, values))

    def see_activity(self, activity: Activity) -> None:
        """Scale to zero or from zero, as the operator does twice a second."""
        if activity is not self.activity:
            self.activity = activity
            self._changed.set()
        if self._hpa is None or self._is_ending:
            return
        if (handover := plan_zero(self.service.spec, self._observe().deployment, activity)) is not None:
            self._set_replicas(handover.count)

    async def stop(self) -> None:
        """Stop all pods, each with its grace period."""
        self._is_ending = True
        self._set_replicas(0)
        for pod in self._pods:
            self._begin_stop(pod)
        await asyncio.gather(*self._stopping)

    def kill(self) -> None:
        for pod in self._pods:
            pod.kill()

    def _set_replicas(self, wanted: int) -> None:
        if wanted != self.replicas:
            if not self._is_ending:
                self._options.report(f"{self.key}: {self.replicas} -> {wanted} engines")
            self.replicas = wanted
            self._changed.set()

    def _scale(self, http: aiohttp.ClientSession) -> None:
        """Start and stop pods as a ReplicaSet does: pods that are not ready go first, then the newest."""
        living = [pod for pod in self._pods if pod not in self._ending_pods]
        while len(living) < self.replicas:
            self._number += 1
            name = f"{names.engine_name(self.service.name)}-{self._number}"
            living.append(pod := Pod(self._plan, name, http, self._changed.set))
            self._pods.append(pod)
        living.sort(key=lambda pod: not pod.is_ready)
        for pod in reversed(living[self.replicas :]):
            self._begin_stop(pod)

    def _begin_stop(self, pod: Pod) -> None:
        """Stop a pod in the background, once: an engine takes a second SIGTERM as the order to drop its requests."""
        if pod not in self._ending_pods:
            self._ending_pods.add(pod)
            stopping = asyncio.create_task(self._remove(pod))
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)

    async def _remove(self, pod: Pod) -> None:
        await pod.stop()
        self._pods.remove(pod)
        self._ending_pods.discard(pod)
        self._changed.set()

    def _observe(self) -> Observed:
        """Return the pods, and the Deployment as its controller would report it."""
        living = [pod for pod in self._pods if not pod.is_leaving]
        ready = len(self.ready_pods)
        if not self._is_ending and ready == self.replicas == len(living):
            self._was_complete = True
        progress = "NewReplicaSetAvailable" if self._was_complete else "ReplicaSetUpdated"
        deployment = DeploymentState(
            generation=1,
            observed_generation=1,
            requested_replicas=self.replicas,
            replicas_managers=frozenset((names.REPLICAS_FIELD_MANAGER,)),
            template_hash=self._desired.template_hash,
            pod_template=TEMPLATE_LABEL,
            revision=1,
            replicas=len(living),
            updated_replicas=len(living),
            ready_replicas=ready,
            available_replicas=ready,
            conditions={"Progressing": ("True", progress, "")},
        )
        pods = tuple(pod.state for pod in self._pods)
        replica_set = ReplicaSetState(TEMPLATE_LABEL, TEMPLATE_LABEL)
        return Observed(deployment=deployment, pods=pods, ready_endpoints=ready, replica_sets=(replica_set,))

    def _build_status(self) -> dict[str, Any]:
        now, observed = datetime.now(UTC), self._observe()
        if self._starts.see(observed.pods) and self._hpa is not None:
            self._hpa.apply(self._build_autoscaler())
        situation = Situation(
            self.service.spec,
            observed,
            now=now,
            activity=self.activity,
            former=read_former(self.status),
            start_seconds=max(self._starts.seconds, default=0),
            name=NameOf(self.key, self.service.served_model_name, NameAnswer(NameState.HELD)),
        )
        period_seconds = self._starts.choose_period(self.service.spec.queue.timeout_seconds)
        starting = count_starting(observed.pods, len(self.ready_pods), period_seconds, now)
        url = self._options.url + names.gateway_path(self.service.namespace, self.service.name)
        written = Written(url, self._desired.effective, last_start=self._starts.last, starting_replicas=starting)
        return build_status(self.service, situation, written, self.status, now)

    def _build_hpa(self) -> Hpa | None:
        if not self._options.autoscales or self._build_autoscaler() is None:
            return None
        return Hpa(self._build_autoscaler(), Controller(self._options.sync_seconds))

    def _build_autoscaler(self) -> Any:
        period_seconds = self._starts.choose_period(self.service.spec.queue.timeout_seconds)
        return build_autoscaler(self._desired.owner, self.service.settled_spec, period_seconds)

    def _check_start(self) -> None:
        """Raise RunError if the service has never been ready, and its engines cannot start."""
        self._was_ready = self._was_ready or bool(self.ready_pods)
        if self._was_ready or self._is_ending:
            return
        restarts = max((pod.restarts for pod in self._pods), default=0)
        if self.ready.reason in LASTING_FAILURES or restarts >= _MOST_FIRST_FAILURES:
            raise RunError(f"{self.key}: {self.ready.message}; its logs are in {self._plan.folder}", 1)
