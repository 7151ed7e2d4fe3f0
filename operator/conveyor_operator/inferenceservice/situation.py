"""The situation of one InferenceService: what its conditions are judged by, and what keeps its engines from being
ready. Pure; made by `case`, read by `conditions` and `status`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from conveyor_api import names
from conveyor_api.conditions import MODEL_FAILURES, ConditionType, Reason
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.failures import PodFailure, find_failures
from conveyor_operator.inferenceservice.naming import NameOf
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.inferenceservice.replicas import is_asleep, may_sleep
from conveyor_operator.loop.steps import Obstacle
from conveyor_operator.metrics_api.answer import MetricsApi

# Children without which there are no pods of this spec.
POD_KINDS = ("ServiceAccount", "PersistentVolumeClaim", "ConfigMap", "Job", "Deployment")

# Reasons of the Deployment's condition Progressing.
_CONTROLLER_REASONS = {
    "ProgressDeadlineExceeded": Reason.PROGRESS_DEADLINE_EXCEEDED,
    "ReplicaSetCreateError": Reason.PODS_REFUSED,
}

_MODEL_REASONS = MODEL_FAILURES | {Reason.CLAIM_NOT_FOUND, Reason.SECRET_NOT_FOUND}


@dataclass(frozen=True, slots=True)
class Blocker:
    """What keeps engines from being ready; `temporary` if waiting is all it takes."""

    reason: str
    message: str
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Former:
    """What the status that is there says."""

    answered_from_zero: bool = False
    """At zero, or while the first engine starts."""
    was_whole: bool = False
    """`Ready`: since the last start or failure all wanted engines have been ready."""
    tried_template: str = ""


def read_former(status: Mapping[str, Any]) -> Former:
    said = [(each["type"], each["status"], each["reason"]) for each in status.get("conditions") or ()]

    def says_ready(*reasons: Reason) -> bool:
        return any((ConditionType.READY, "True", reason) in said for reason in reasons)

    from_zero = says_ready(Reason.SCALED_TO_ZERO, Reason.STARTING_FROM_ZERO)
    return Former(from_zero, says_ready(Reason.READY), str(status.get("triedTemplate") or ""))


@dataclass(frozen=True)
class Situation:
    """All that the conditions are judged by."""

    spec: InferenceServiceSpec
    observed: Observed
    obstacles: tuple[Obstacle, ...] = ()
    metrics_api: MetricsApi = field(default_factory=MetricsApi)
    template_generation: int = 0
    """Generation of the Deployment that brought its present pod template, as far as is known."""
    start_seconds: int = 0
    """What the slowest of the last pods took to start; 0: not known."""
    activity: Activity = Activity.STEADY
    former: Former = field(default_factory=Former)
    prewarming: bool = False
    """A Job fetches the model, and pods of this spec come when it is there."""
    podless_job: str = ""
    """Its name, if no pod of it could be made."""
    serves_keda: bool | None = None
    """Whether the cluster has ScaledObjects, as far as is known."""
    name: NameOf = field(default_factory=NameOf)
    """The served name, and to whom it belongs."""

    @property
    def deployment(self) -> DeploymentState:
        return self.observed.deployment or DeploymentState(asked_replicas=self.spec.first_replicas, generation=1)

    @property
    def rolled_out(self) -> bool:
        """The pods of the present template have all been ready, and no others are left."""
        return self._template_seen and self.deployment.rolled_out

    @property
    def brings_first_pods(self) -> bool:
        """Pods are on their way and replace none."""
        return self.deployment.is_first and (self._template_seen or self.deployment.replicas == 0)

    @property
    def _template_seen(self) -> bool:
        return self.deployment.observed_generation >= self.template_generation

    @property
    def is_asleep(self) -> bool:
        """No engine is asked for, and a request starts one."""
        return is_asleep(self.spec, self.observed.deployment)

    @property
    def starts_from_zero(self) -> bool:
        """A request has asked for the first engine, and none has failed since."""
        return self.former.answered_from_zero and may_sleep(self.spec) and self.deployment.asked_replicas > 0

    @property
    def wants_none(self) -> bool:
        """No engine is asked for, and none is left that matters."""
        return self.is_asleep or (self.deployment.asked_replicas == 0 and self.deployment.replicas == 0)

    @property
    def ready_template(self) -> str:
        """Hash of the last pod template of which engines were ready; empty if none ever was."""
        proven = self.rolled_out and self.deployment.available_replicas > 0
        return self.deployment.template_hash if proven else self.former.tried_template

    @property
    def is_untried(self) -> bool:
        """The pod template has changed since engines were ready."""
        return self.ready_template not in ("", self.deployment.template_hash)

    @property
    def why_none(self) -> str:
        """Why no engine is wanted, and what follows."""
        if not self.is_asleep:
            return "replicas is 0, so no engine runs"
        timeout_seconds = self.spec.queue.timeout_seconds
        told = "scaled to zero while idle; the next request starts an engine and waits for it"
        if self.is_untried:
            return f"{told}; no engine has started with the current spec yet"
        if not self.start_seconds:
            return told
        told = f"{told}; the last starts took up to {self.start_seconds} s"
        if self.start_seconds < timeout_seconds:
            return told
        return f"{told}, longer than queue.timeout ({timeout_seconds:g} s): raise queue.timeout"

    @property
    def ready_count(self) -> str:
        """In words, for messages."""
        return f"{self.deployment.available_replicas} of {self.deployment.asked_replicas} engines are ready"

    @property
    def gpus_asked(self) -> int:
        """The GPUs that each engine requests. Conveyor's own engine uses one."""
        limits = self.spec.resources.limits
        return sum(int(amount) for name, amount in limits.items() if name.startswith(names.GPU_VENDOR))

    @property
    def pods(self) -> list[PodState]:
        return self.observed.newest_pods

    @cached_property
    def blocker(self) -> Blocker | None:
        """What keeps engines of this spec from being ready, in every condition that depends on them."""
        obstacle = self.obstacle(*POD_KINDS)
        if obstacle is not None:
            return Blocker(obstacle.reason, obstacle.message, obstacle.temporary)
        if self.prewarming:
            return self._prewarm_blocker
        if self.rolled_out and self._all_asked_are_there:
            return None
        failures = self._failures
        if failures:
            return _sum_up(failures)
        if self.observed.refused and not (self.observed.lacks_quota and self._goes_on_without):
            return Blocker(Reason.PODS_REFUSED, self.observed.refused)
        return self._controllers_blocker

    @property
    def _controllers_blocker(self) -> Blocker | None:
        """What the Deployment's controller says of the present template, once it has seen it."""
        _, reason, message = self.deployment.conditions.get("Progressing", ("", "", ""))
        if not self._template_seen or reason not in _CONTROLLER_REASONS:
            return None
        return Blocker(_CONTROLLER_REASONS[reason], message)

    @property
    def _prewarm_blocker(self) -> Blocker | None:
        if self.podless_job:
            told = f"Job {self.podless_job} could not create its pod; kubectl describe job {self.podless_job} shows why"
            return Blocker(Reason.PODS_REFUSED, told)
        pods = self.observed.prewarm_pods
        failures = find_failures([pod for pod in pods if pod.phase != "Failed"] or pods)
        return _sum_up(failures) if failures else None

    @property
    def _all_asked_are_there(self) -> bool:
        return self.deployment.available_replicas >= self.deployment.asked_replicas

    @property
    def _goes_on_without(self) -> bool:
        """A pod that is missing is the one more which a rollout can do without."""
        return self.spec.rollout.is_open and self.deployment.replaces_pods and self._all_asked_are_there

    @property
    def _failures(self) -> list[PodFailure]:
        """The failures of pods that count. Not counted are pods that are being replaced, pods that wait for a GPU about
        to be free, and the surge pod of a rollout that can go on without it."""
        pods = self.pods
        living = [pod for pod in pods if pod.phase != "Failed"]
        found = find_failures(living if len(living) >= self.deployment.asked_replicas else pods)
        frees_gpu = self._one_too_many or any(pod.leaving for pod in self.observed.pods)
        extra = self._goes_on_without
        borne: dict[str, bool] = {Reason.INSUFFICIENT_GPU: frees_gpu or extra, Reason.UNSCHEDULABLE: extra}
        return [failure for failure in found if not borne.get(failure.reason, False)]

    @property
    def _one_too_many(self) -> bool:
        """More pods are there than a rollout without surge leaves: one is leaving, which its own watch will say."""
        there = sum(not pod.leaving and pod.phase not in ("Failed", "Succeeded") for pod in self.observed.pods)
        return self.deployment.max_surge == 0 and there > self.deployment.asked_replicas

    @property
    def serving_obstacle(self) -> Obstacle | None:
        """What stands in the way of the engines of this spec, or of finding them."""
        return self.obstacle(*POD_KINDS) or self.engine_service_obstacle

    @property
    def engine_service_obstacle(self) -> Obstacle | None:
        return next((o for o in self.obstacles if o.kind == "Service" and o.name.endswith(names.ENGINE_SUFFIX)), None)

    def obstacle(self, *kinds: str) -> Obstacle | None:
        return next((o for o in self.obstacles if not kinds or o.kind in kinds), None)


def _sum_up(failures: list[PodFailure]) -> Blocker:
    """One failure for all; a model's comes first. It stays the same while they last, however often each pod fails."""
    first = min(failures, key=lambda f: (f.reason not in _MODEL_REASONS, f.reason, f.pod))
    others = Counter(failure.reason for failure in failures)[first.reason] - 1
    more = f" and {others} more" if others else ""
    return Blocker(first.reason, f"{first.message} (pod {first.pod}{more})")
