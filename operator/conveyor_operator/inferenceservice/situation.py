"""The situation of one InferenceService: the facts for its conditions, and what keeps its engines from being ready.

Pure; built by `case`, read by `conditions` and `status`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from conveyor_api import names
from conveyor_api.conditions import MODEL_FAILURES, ConditionType, Reason
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.failures import PodFailure, find_failures, may_fit_later
from conveyor_operator.inferenceservice.kinds import POD_KINDS
from conveyor_operator.inferenceservice.naming import NameOf
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed, RolledBack
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.inferenceservice.replicas import is_asleep, may_sleep
from conveyor_operator.loop.steps import Obstacle
from conveyor_operator.metrics_api.answer import MetricsApi

# By the reason of the Deployment's condition Progressing: the reason that Conveyor reports.
_CONTROLLER_REASONS = {
    "ProgressDeadlineExceeded": Reason.PROGRESS_DEADLINE_EXCEEDED,
    "ReplicaSetCreateError": Reason.PODS_REFUSED,
}

_LONG_AFTER = datetime.max.replace(tzinfo=UTC)

_MODEL_REASONS = MODEL_FAILURES | {Reason.CLAIM_NOT_FOUND}


@dataclass(frozen=True, slots=True)
class Blocker:
    """What keeps engines from being ready. `temporary`: it resolves without action."""

    reason: str
    message: str
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Former:
    """Facts from the previous status."""

    answered_from_zero: bool = False
    """Whether `Ready` was True at zero, or while the first engine started."""
    was_scaling: bool = False
    """Whether the HPA read its metrics."""
    was_whole: bool = False
    """Whether `Ready` had the reason `Ready`: all desired engines have been ready since the last start or failure."""
    tried_template: str = ""


def read_former(status: Mapping[str, Any]) -> Former:
    said = [(each["type"], each["status"], each["reason"]) for each in status.get("conditions") or ()]

    def says_ready(*reasons: Reason) -> bool:
        return any((ConditionType.READY, "True", reason) in said for reason in reasons)

    from_zero = says_ready(Reason.SCALED_TO_ZERO, Reason.STARTING_FROM_ZERO)
    was_scaling = (ConditionType.SCALING_READY, "True", Reason.SCALING_ACTIVE) in said
    return Former(from_zero, was_scaling, says_ready(Reason.READY), str(status.get("triedTemplate") or ""))


@dataclass(frozen=True)
class Situation:
    """All facts from which the conditions are computed."""

    spec: InferenceServiceSpec
    observed: Observed
    obstacles: tuple[Obstacle, ...] = ()
    metrics_api: MetricsApi = field(default_factory=MetricsApi)
    template_generation: int = 0
    """The Deployment's generation at the last known change of its pod template."""
    start_seconds: int = 0
    """How long the slowest of the last pods took to start, in seconds; 0 if unknown."""
    now: datetime = _LONG_AFTER
    activity: Activity = Activity.STEADY
    former: Former = field(default_factory=Former)
    prewarming: bool = False
    """Whether a Job is downloading the model. Pods of this spec are created once it has finished."""
    podless_job: str = ""
    """Name of the Job, if its pod could not be created; otherwise ""."""
    serves_keda: bool | None = None
    """Whether the cluster serves ScaledObjects; None if unknown, or if the service does not use KEDA."""
    rolled_back: RolledBack | None = None
    """Why the pods of an earlier spec were restored; None if they were not."""
    checks: bool = False
    """Whether a Job tries the image and configuration of the new pods before an old pod is removed."""
    keeps_template: bool = False
    """Whether the Deployment has the former pod template until then."""
    removes_first: str = ""
    """Why the rollout removes an old pod first; "" if it does not, or if the spec says so."""
    name: NameOf = field(default_factory=NameOf)
    """The served name, and the state of its claim."""

    @property
    def deployment(self) -> DeploymentState:
        return self.observed.deployment or DeploymentState(requested_replicas=self.spec.first_replicas, generation=1)

    @property
    def rolled_out(self) -> bool:
        """Whether all pods of the current template have been ready, and no others exist."""
        return self._template_seen and self.deployment.rolled_out

    @property
    def brings_first_pods(self) -> bool:
        """Whether the first pods are being created and replace no others."""
        return self.deployment.is_first and (self._template_seen or self.deployment.replicas == 0)

    @property
    def _template_seen(self) -> bool:
        return self.deployment.observed_generation >= self.template_generation

    @property
    def is_asleep(self) -> bool:
        """Whether the service is scaled to zero, and the next request starts an engine."""
        return is_asleep(self.spec, self.observed.deployment)

    @property
    def starts_from_zero(self) -> bool:
        """Whether the first engine starts for a request, without a failure so far."""
        return self.former.answered_from_zero and may_sleep(self.spec) and self.deployment.requested_replicas > 0

    @property
    def wants_none(self) -> bool:
        """Whether no engine is desired. Unless the service is scaled to zero while idle, no pod may exist either."""
        return self.is_asleep or (self.deployment.requested_replicas == 0 and self.deployment.replicas == 0)

    @property
    def ready_template(self) -> str:
        """Hash of the last pod template with ready engines; "" if there has been none."""
        proven = self.rolled_out and self.deployment.available_replicas > 0
        return self.deployment.template_hash if proven else self.former.tried_template

    @property
    def is_untried(self) -> bool:
        """Whether the pod template has changed since engines were last ready."""
        return self.ready_template not in ("", self.deployment.template_hash)

    @property
    def why_none(self) -> str:
        """Why no engine is desired, and what the next request has to expect."""
        if not self.is_asleep:
            return "replicas is 0, so no engine runs"
        timeout_seconds = self.spec.queue.timeout_seconds
        message = "scaled to zero while idle; the next request starts an engine and waits for it"
        if self.is_untried:
            return f"{message}; no engine has started with the current spec yet"
        if not self.start_seconds:
            return message
        message = f"{message}; the last starts took up to {self.start_seconds} s"
        if self.start_seconds < timeout_seconds:
            return message
        return f"{message}, longer than queue.timeout ({timeout_seconds:g} s): raise queue.timeout"

    @property
    def ready_count(self) -> str:
        """The number of ready engines, in words for messages."""
        return f"{self.deployment.available_replicas} of {self.deployment.requested_replicas} engines are ready"

    @property
    def rollout_count(self) -> str:
        """How far the rollout is, in words for messages.

        Until the Deployment's controller has seen the template, it reports the pods of the former one as updated.
        """
        total = max(self.deployment.requested_replicas, self.deployment.replicas)
        seen = self._template_seen and not self.keeps_template
        updated = min(self.deployment.updated_replicas, total) if seen else 0
        message = f"{updated} of {total} pods run the current spec, {self.deployment.available_replicas} are ready"
        if self.checks:
            message += "; a Job tries the new image and configuration before an engine is removed"
        if not self.removes_first:
            return message
        removed = "the only engine" if self.deployment.requested_replicas == 1 else "an engine"
        instead = "rollout: {maxSurge: 1, maxUnavailable: 0} changes this"
        return f"{message}; removes {removed} first, because {self.removes_first}; {instead}"

    @property
    def pods(self) -> list[PodState]:
        return self.observed.newest_pods

    @cached_property
    def blocker(self) -> Blocker | None:
        """What keeps engines of this spec from being ready. All conditions that depend on engines use it."""
        obstacle = self.obstacle(*POD_KINDS)
        if obstacle is not None:
            return Blocker(obstacle.reason, obstacle.message, obstacle.temporary)
        if self.prewarming:
            return self._prewarm_blocker
        failures = self._check_failures
        if failures:
            return _sum_up(failures)
        if self.rolled_out and self._all_requested_exist:
            return None
        failures = self._failures
        if failures:
            return _sum_up(failures)
        if self.observed.refused and not (self.observed.lacks_quota and self._goes_on_without):
            return Blocker(Reason.PODS_REFUSED, self.observed.refused)
        return self._controllers_blocker

    @property
    def _controllers_blocker(self) -> Blocker | None:
        """The failure that the Deployment's controller reports, once it has seen the current template."""
        _, reason, message = self.deployment.conditions.get("Progressing", ("", "", ""))
        if not self._template_seen or reason not in _CONTROLLER_REASONS:
            return None
        return Blocker(_CONTROLLER_REASONS[reason], message)

    @property
    def exceeds_deadline(self) -> bool:
        """Whether the pods of the current template were not ready within the Deployment's progress deadline."""
        blocker = self._controllers_blocker
        return blocker is not None and blocker.reason == Reason.PROGRESS_DEADLINE_EXCEEDED

    @property
    def _check_failures(self) -> list[PodFailure]:
        """The failures of the Job that tries the new pods' image and configuration. It goes on without a node."""
        pods = self.observed.check_pods if self.checks else ()
        return find_failures(pod for pod in pods if not may_fit_later(pod.unschedulable))

    @property
    def _prewarm_blocker(self) -> Blocker | None:
        if self.podless_job:
            job = self.podless_job
            message = f"Job {job} could not create its pod; kubectl describe job {job} shows why"
            return Blocker(Reason.PODS_REFUSED, message)
        pods = self.observed.prewarm_pods
        failures = find_failures([pod for pod in pods if pod.phase != "Failed"] or pods)
        return _sum_up(failures) if failures else None

    @property
    def _all_requested_exist(self) -> bool:
        return self.deployment.available_replicas >= self.deployment.requested_replicas

    @property
    def _goes_on_without(self) -> bool:
        """Whether only the additional pod of a rollout is missing, and the rollout can continue without it."""
        return self.spec.rollout.is_open and self.deployment.replaces_pods and self._all_requested_exist

    @property
    def _failures(self) -> list[PodFailure]:
        """The failures of pods that matter.

        Three kinds of pods do not count: Failed pods that have been replaced, pods that wait for a GPU that is about to
        be free, and the additional pod of a rollout that can continue without it.
        """
        pods = self.pods
        living = [pod for pod in pods if pod.phase != "Failed"]
        found = find_failures(living if len(living) >= self.deployment.requested_replicas else pods)
        frees_gpu = self._one_too_many or any(pod.leaving for pod in self.observed.pods)
        extra = self._goes_on_without

        def is_borne(failure: PodFailure) -> bool:
            gpu, other = failure.reason == Reason.INSUFFICIENT_GPU, failure.reason == Reason.UNSCHEDULABLE
            return (gpu and frees_gpu) or (extra and (gpu or other) and may_fit_later(failure.message))

        return [failure for failure in found if not is_borne(failure)]

    @property
    def _one_too_many(self) -> bool:
        """Whether more pods exist than a rollout without surge allows, so one is about to be deleted."""
        there = sum(not pod.leaving and pod.phase not in ("Failed", "Succeeded") for pod in self.observed.pods)
        return self.deployment.max_surge == 0 and there > self.deployment.requested_replicas

    @property
    def serving_obstacle(self) -> Obstacle | None:
        """The obstacle to creating engines of this spec, or to the Service with which the gateway finds them."""
        return self.obstacle(*POD_KINDS) or self.engine_service_obstacle

    @property
    def engine_service_obstacle(self) -> Obstacle | None:
        return next((o for o in self.obstacles if o.kind == "Service" and o.name.endswith(names.ENGINE_SUFFIX)), None)

    @property
    def stopping_obstacle(self) -> Obstacle | None:
        """The first obstacle that matters while no engine answers. No engine needs, for example, a contested HPA."""
        return self.serving_obstacle or next((o for o in self.obstacles if o.reason != Reason.CONTESTED), None)

    def obstacle(self, *kinds: str) -> Obstacle | None:
        return next((o for o in self.obstacles if not kinds or o.kind in kinds), None)


def _sum_up(failures: list[PodFailure]) -> Blocker:
    """Return one blocker for all failures; a model's failure comes first. How often each pod fails does not matter."""
    first = min(failures, key=lambda f: (f.reason not in _MODEL_REASONS, f.reason, f.pod))
    others = Counter(failure.reason for failure in failures)[first.reason] - 1
    more = f" and {others} more" if others else ""
    return Blocker(first.reason, f"{first.message} (pod {first.pod}{more})")
