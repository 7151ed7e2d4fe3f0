"""Each condition of an InferenceService, judged from what was observed. Pure; assembled by `status`.

Which reasons there are, and what they mean, stands in `conveyor_api.conditions`. A message contains no time and no
count of tries, so that a status is written only when something happened.
"""

from dataclasses import dataclass, field

from conveyor_api import names
from conveyor_api.conditions import MODEL_FAILURES, ConditionType, Reason
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.failures import PodFailure, find_failures
from conveyor_operator.manifests.deployment import FETCH_CONTAINER
from conveyor_operator.observed import DeploymentState, Observed
from conveyor_operator.plan import Obstacle
from conveyor_operator.pods import PodState
from conveyor_operator.scaling import MetricsApi, judge_scaling

_MODEL_REASONS = MODEL_FAILURES | {Reason.CLAIM_NOT_FOUND, Reason.SECRET_NOT_FOUND}

# Children without which there are no pods of this spec.
_POD_KINDS = ("ServiceAccount", "PersistentVolumeClaim", "ConfigMap", "Deployment")

# Reasons of a condition that is not True although nobody has to do anything.
IN_PROGRESS = frozenset(
    {Reason.ROLLING_OUT, Reason.SCALING, Reason.MODEL_DOWNLOADING, Reason.MODEL_LOADING, Reason.PODS_STARTING,
     Reason.NO_READY_ENDPOINTS, Reason.WAITING_FOR_AUTOSCALER, Reason.SCALED_TO_ZERO, Reason.UP_TO_DATE}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judged:
    """One condition, without its times."""

    type: ConditionType
    status: str
    reason: str
    message: str

    @property
    def is_true(self) -> bool:
        return self.status == "True"


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the conditions are judged by."""

    spec: InferenceServiceSpec
    observed: Observed
    obstacles: tuple[Obstacle, ...] = ()
    metrics_api: MetricsApi = field(default_factory=MetricsApi)

    @property
    def deployment(self) -> DeploymentState:
        return self.observed.deployment or DeploymentState(asked_replicas=self.spec.replicas, generation=1)

    @property
    def wants_none(self) -> bool:
        """No engine is asked for, and none is left."""
        return self.deployment.asked_replicas == 0 and self.deployment.replicas == 0

    @property
    def pods(self) -> list[PodState]:
        """The pods of the present template that are to stay; how others fare says nothing about this spec."""
        wanted = self.deployment.config_hash
        return [pod for pod in self.observed.pods if pod.config_hash == wanted and not pod.leaving]

    @property
    def failures(self) -> list[PodFailure]:
        """What keeps those pods from being ready now, the latest first."""
        return find_failures(self.pods)

    @property
    def serving_obstacle(self) -> Obstacle | None:
        """What stands in the way of the engines of this spec, or of finding them."""
        return self.obstacle(*_POD_KINDS) or self.engine_service_obstacle

    @property
    def engine_service_obstacle(self) -> Obstacle | None:
        return next((o for o in self.obstacles if o.kind == "Service" and o.name.endswith(names.ENGINE_SUFFIX)), None)

    def obstacle(self, *kinds: str) -> Obstacle | None:
        return next((o for o in self.obstacles if not kinds or o.kind in kinds), None)


def judge_all(situation: Situation) -> list[Judged]:
    """`Ready` first, then the others in their order."""
    progressing = judge_progressing(situation)
    parts = [
        progressing,
        judge_model(situation),
        judge_workload(situation),
        judge_endpoint(situation),
        judge_scaling_ready(situation),
    ]
    return [judge_ready(situation, parts), *parts]


def judge_ready(situation: Situation, parts: list[Judged]) -> Judged:
    """At least one engine answers, and the API server lets the spec through to the engines.

    Not that all replicas are there, nor that all run the present spec: a service that scales, rolls out, or has lost
    one of three pods answers.
    """
    by_type = {part.type: part for part in parts}
    answers = by_type[ConditionType.ENDPOINT_READY].is_true
    obstacle = situation.serving_obstacle if answers else situation.serving_obstacle or situation.obstacle()
    if obstacle is not None and not (obstacle.temporary and answers):
        return Judged(ConditionType.READY, "False", obstacle.reason, obstacle.message)
    if situation.wants_none:
        return Judged(ConditionType.READY, "False", Reason.SCALED_TO_ZERO, "replicas is 0: no engine is wanted")
    if answers:
        return Judged(ConditionType.READY, "True", Reason.READY, _count_message(situation))
    blamed = _first_to_blame(by_type, situation.deployment.rolled_out)
    return Judged(ConditionType.READY, "False", blamed.reason, blamed.message)


def _first_to_blame(by_type: dict[ConditionType, Judged], rolled_out: bool) -> Judged:
    """What a person should look at: a failure before a wait, the cause before its effects."""
    order = (ConditionType.MODEL_AVAILABLE, ConditionType.WORKLOAD_READY, ConditionType.ENDPOINT_READY)
    missing = [by_type[type] for type in order if not by_type[type].is_true]
    failed = [part for part in missing if part.reason not in IN_PROGRESS]
    if failed:
        return failed[0]
    if not rolled_out:
        return by_type[ConditionType.PROGRESSING]
    return missing[0]


def judge_progressing(situation: Situation) -> Judged:
    """Obstacles last, but for those of the pods: what is under way is told first, then what never gets under way."""
    deployment, type = situation.deployment, ConditionType.PROGRESSING
    obstacle = situation.obstacle(*_POD_KINDS)
    if obstacle is not None and not obstacle.temporary:
        return Judged(type, "False", obstacle.reason, obstacle.message)
    if deployment.conditions.get("Progressing", ("", "", ""))[1] == "ProgressDeadlineExceeded":
        message = deployment.conditions["Progressing"][2]
        return Judged(type, "False", Reason.PROGRESS_DEADLINE_EXCEEDED, message)
    if situation.observed.deployment is None:
        return Judged(type, "True", Reason.PODS_STARTING, "the Deployment is not there yet")
    if not deployment.rolled_out:
        told = f"{deployment.updated_replicas} of {deployment.asked_replicas} pods run the present spec"
        return Judged(type, "True", Reason.ROLLING_OUT, told)
    if deployment.replicas != deployment.asked_replicas:
        told = f"there are {deployment.replicas} pods, {deployment.asked_replicas} are wanted"
        return Judged(type, "True", Reason.SCALING, told)
    if deployment.available_replicas < deployment.asked_replicas:
        return Judged(type, "True", Reason.PODS_STARTING, _count_message(situation))
    obstacle = situation.obstacle()
    if obstacle is not None:
        return Judged(type, "True" if obstacle.temporary else "False", obstacle.reason, obstacle.message)
    return Judged(type, "False", Reason.UP_TO_DATE, "all pods run the present spec")


def judge_model(situation: Situation) -> Judged:
    """By the pods of the present spec, if there are any; the old ones have another model, perhaps."""
    type = ConditionType.MODEL_AVAILABLE
    failure = next((f for f in situation.failures if f.reason in _MODEL_REASONS), None)
    pods = situation.pods
    if any(pod.ready for pod in pods):
        return Judged(type, "True", Reason.MODEL_LOADED, "at least one engine has loaded the model")
    if failure is not None:
        return Judged(type, "False", failure.reason, f"{failure.message} (pod {failure.pod})")
    if situation.wants_none:
        return Judged(type, "Unknown", Reason.SCALED_TO_ZERO, "no engine is wanted, so none has loaded the model")
    if any(_has_fetched(pod) for pod in pods):
        return Judged(type, "False", Reason.MODEL_LOADING, "the first engine is loading the model")
    if any(container.running for pod in pods for container in pod.containers if container.initial):
        return Judged(type, "False", Reason.MODEL_DOWNLOADING, "the first engine is fetching the model")
    return Judged(type, "Unknown", Reason.MODEL_DOWNLOADING, "no engine has begun to fetch the model")


def judge_workload(situation: Situation) -> Judged:
    deployment, type = situation.deployment, ConditionType.WORKLOAD_READY
    obstacle = situation.obstacle(*_POD_KINDS)
    if obstacle is not None:
        return Judged(type, "False", obstacle.reason, obstacle.message)
    if situation.wants_none:
        return Judged(type, "True", Reason.SCALED_TO_ZERO, "replicas is 0: no engine is wanted")
    if deployment.complete:
        return Judged(type, "True", Reason.REPLICAS_READY, _count_message(situation))
    failure = next(iter(situation.failures), None)
    if failure is not None:
        return Judged(type, "False", failure.reason, f"{failure.message} (pod {failure.pod})")
    refused = deployment.conditions.get("ReplicaFailure")
    if refused is not None and refused[0] == "True":
        return Judged(type, "False", Reason.PODS_REFUSED, refused[2])
    progress = deployment.conditions.get("Progressing", ("", "", ""))
    if progress[1] == "ProgressDeadlineExceeded":
        return Judged(type, "False", Reason.PROGRESS_DEADLINE_EXCEEDED, progress[2])
    return Judged(type, "False", Reason.PODS_STARTING, _count_message(situation))


def judge_endpoint(situation: Situation) -> Judged:
    """Whether the gateway has an engine to send to: it reads the same EndpointSlices."""
    count, type = situation.observed.ready_endpoints, ConditionType.ENDPOINT_READY
    if count > 0:
        return Judged(type, "True", Reason.ENDPOINTS_AVAILABLE, "the gateway has engines to send requests to")
    obstacle = situation.engine_service_obstacle
    if obstacle is not None:
        return Judged(type, "False", obstacle.reason, obstacle.message)
    if situation.wants_none:
        return Judged(type, "False", Reason.SCALED_TO_ZERO, "no engine is wanted, so requests wait in the gateway")
    return Judged(type, "False", Reason.NO_READY_ENDPOINTS, "no engine is ready; requests wait in the gateway")


def judge_scaling_ready(situation: Situation) -> Judged:
    obstacle = situation.obstacle("HorizontalPodAutoscaler")
    if obstacle is not None:
        return Judged(ConditionType.SCALING_READY, "False", obstacle.reason, obstacle.message)
    judged = judge_scaling(situation.spec, situation.observed, situation.metrics_api)
    return Judged(ConditionType.SCALING_READY, *judged)


def _has_fetched(pod: PodState) -> bool:
    return any(c.name == FETCH_CONTAINER and c.ended and c.exit_code == 0 for c in pod.containers)


def _count_message(situation: Situation) -> str:
    deployment = situation.deployment
    return f"{deployment.available_replicas} of {deployment.asked_replicas} engines are ready"
