"""Computes each condition of an InferenceService from its situation. Pure; `status` puts them together.

`conveyor_api.conditions` defines the reasons. A message contains no time and no number of attempts, so that a status is
written only when something changes. `situation` finds once what keeps the engines from being ready. Every condition
that depends on the engines has this same cause.
"""

from dataclasses import dataclass, replace

from conveyor_api.conditions import SEE_READY, STALLING_FAILURES, ConditionType, Reason
from conveyor_api.model import Mounted
from conveyor_operator.inferenceservice.gap import is_short_gap
from conveyor_operator.inferenceservice.kinds import POD_KINDS
from conveyor_operator.inferenceservice.manifests.pods import DRAFT_CONTAINER, FETCH_CONTAINER
from conveyor_operator.inferenceservice.naming import judge_claim
from conveyor_operator.inferenceservice.pods import PodState
from conveyor_operator.inferenceservice.scaling import SCALES, judge_scaling
from conveyor_operator.inferenceservice.situation import Blocker, Situation

# Reasons that need no action, even if their condition is not True.
IN_PROGRESS = frozenset(
    {Reason.ROLLING_OUT, Reason.MODEL_DOWNLOADING, Reason.MODEL_LOADING, Reason.PODS_STARTING,
     Reason.NO_READY_ENDPOINTS, Reason.WAITING_FOR_AUTOSCALER, Reason.SCALED_TO_ZERO, Reason.STARTING_FROM_ZERO,
     Reason.UP_TO_DATE, Reason.NAME_PENDING}
)  # fmt: skip
_PREWARMING = "a Job is downloading the model; pods of the current spec start when it has finished"
_RESTORED = (
    "The rollout failed, so the pods of the former spec run again. Correct the spec, or change an annotation in "
    "pod.annotations to try the same spec again."
)


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


def judge_all(situation: Situation) -> list[Judged]:
    """Return all conditions: `Ready` first, then the others in a fixed order.

    `Ready`, `Reconciling` and `Stalled` have the blocker's message, which may be long. The others refer to `Ready`.
    """
    parts = [
        progressing := judge_progressing(situation),
        judge_model(situation),
        judge_workload(situation),
        judge_endpoint(situation),
        judge_scaling_ready(situation),
        judge_name(situation),
    ]
    ready = judge_ready(situation, parts)
    cause = situation.blocker.message if situation.blocker is not None else ""
    told = [_refer(part, cause) if cause and cause in ready.message else part for part in parts]
    return [ready, *told, *judge_kstatus(ready, progressing, situation)]


def _refer(part: Judged, cause: str) -> Judged:
    return replace(part, message=part.message.replace(cause, SEE_READY))


def judge_ready(situation: Situation, parts: list[Judged]) -> Judged:
    """Compute `Ready`. It is true if at least one engine answers and the API server accepts the engines' objects.

    It is also true while the service is scaled to zero, or starts from zero without a failure.
    It does not mean that all replicas exist or run the current spec: a service that scales, rolls out, or has lost one
    of three pods still answers. If other pods fail, the reason names their problem. After a start or a failure, the
    reason becomes `Ready` only when all desired engines are ready. Later it stays `Ready` during scaling and rollouts.
    """
    by_type, type = {part.type: part for part in parts}, ConditionType.READY
    answers, workload = by_type[ConditionType.ENDPOINT_READY].is_true, by_type[ConditionType.WORKLOAD_READY]
    obstacle = situation.serving_obstacle if answers else situation.stopping_obstacle
    contested = obstacle is not None and obstacle.reason == Reason.CONTESTED
    if obstacle is not None and not (answers and (obstacle.temporary or contested)):
        return Judged(type, "False", obstacle.reason, obstacle.message)
    if situation.wants_none:
        return Judged(type, "True", Reason.SCALED_TO_ZERO, situation.why_none)
    if answers and (obstacle is None or contested) and workload.reason not in (*IN_PROGRESS, Reason.REPLICAS_READY):
        return Judged(type, "True", workload.reason, workload.message)
    if answers:
        starts = workload.reason == Reason.PODS_STARTING and not situation.former.was_whole
        return Judged(type, "True", Reason.PODS_STARTING if starts else Reason.READY, situation.ready_count)
    cause = _find_cause(by_type, situation)
    if situation.starts_from_zero and cause.reason in IN_PROGRESS:
        return Judged(type, "True", Reason.STARTING_FROM_ZERO, f"requests are queued: {cause.message}")
    return Judged(type, "False", cause.reason, cause.message)


def _find_cause(by_type: dict[ConditionType, Judged], situation: Situation) -> Judged:
    """Return the condition that explains the others. Failures come before waits, and causes before their effects."""
    if situation.blocker is not None:
        return Judged(ConditionType.READY, "False", situation.blocker.reason, situation.blocker.message)
    order = (ConditionType.MODEL_AVAILABLE, ConditionType.WORKLOAD_READY, ConditionType.ENDPOINT_READY)
    missing = [by_type[type] for type in order if not by_type[type].is_true]
    failed = [part for part in missing if part.reason not in IN_PROGRESS]
    if failed:
        return failed[0]
    progressing = by_type[ConditionType.PROGRESSING]
    rolls = progressing.reason == Reason.ROLLING_OUT or situation.observed.deployment is None
    return progressing if rolls else missing[0]


def judge_progressing(situation: Situation) -> Judged:
    """Compute whether a rollout of the current spec is in progress. Scaling and later failures do not count."""
    type, blocker = ConditionType.PROGRESSING, situation.blocker
    if situation.rolled_back is not None:
        cause = f"{situation.rolled_back.reason}: {situation.rolled_back.message}"
        return Judged(type, "False", Reason.ROLLED_BACK, f"{cause}. {_RESTORED}")
    rolls = situation.keeps_template or not situation.rolled_out
    if blocker is not None and (situation.prewarming or rolls or situation.obstacle(*POD_KINDS)):
        return Judged(type, "True" if blocker.temporary else "False", blocker.reason, blocker.message)
    if situation.prewarming:
        return Judged(type, "True", Reason.MODEL_DOWNLOADING, _PREWARMING)
    if situation.observed.deployment is None:
        return Judged(type, "True", Reason.PODS_STARTING, "the Deployment does not exist yet")
    if rolls and not situation.keeps_template and situation.brings_first_pods:
        return Judged(type, "True", Reason.PODS_STARTING, situation.ready_count)
    if rolls:
        return Judged(type, "True", Reason.ROLLING_OUT, situation.rollout_count)
    obstacle = situation.obstacle()
    if obstacle is not None:
        return Judged(type, "True" if obstacle.temporary else "False", obstacle.reason, obstacle.message)
    return Judged(type, "False", Reason.UP_TO_DATE, "all pods run the current spec")


def judge_model(situation: Situation) -> Judged:
    """Compute the model's condition from the pods of the current spec, because older pods may have another model."""
    type, pods = ConditionType.MODEL_AVAILABLE, situation.pods
    if situation.prewarming:
        blocker = situation.blocker
        return _blocked(type, blocker) if blocker else Judged(type, "False", Reason.MODEL_DOWNLOADING, _PREWARMING)
    if any(pod.ready for pod in pods):
        return Judged(type, "True", Reason.MODEL_LOADED, "at least one engine has loaded the model")
    if situation.wants_none:
        return Judged(
            type, "Unknown", Reason.SCALED_TO_ZERO, "the service has 0 replicas, so no engine has loaded the model"
        )
    if situation.blocker is not None:
        message = f"no engine of the current spec is ready: {situation.blocker.message}"
        return Judged(type, "False", situation.blocker.reason, message)
    if any(_has_fetched(pod) for pod in pods):
        return Judged(type, "False", Reason.MODEL_LOADING, "the first engine is loading the model")
    begun = any(container.running for pod in pods for container in pod.containers if container.initial)
    status = "False" if begun else "Unknown"
    if isinstance(situation.spec.model.source, Mounted):
        message = (
            "the first engine is checking the model in the volume" if begun else "no engine has checked the volume yet"
        )
        return Judged(type, status, Reason.MODEL_LOADING, message)
    message = "the first engine is downloading the model" if begun else "no engine has started to download the model"
    return Judged(type, status, Reason.MODEL_DOWNLOADING, message)


def judge_workload(situation: Situation) -> Judged:
    deployment, type, blocker = situation.deployment, ConditionType.WORKLOAD_READY, situation.blocker
    if situation.wants_none and not situation.obstacle(*POD_KINDS):
        return Judged(type, "True", Reason.SCALED_TO_ZERO, situation.why_none)
    if blocker is not None:
        some = f"{situation.ready_count}; " if deployment.available_replicas else ""
        return Judged(type, "False", blocker.reason, some + blocker.message)
    if not (situation.rolled_out and deployment.available_replicas >= deployment.requested_replicas):
        return Judged(type, "False", Reason.PODS_STARTING, situation.ready_count)
    spec = situation.spec
    if spec.gpus > spec.tensor_parallel_size and spec.runtime == "Conveyor":
        used = "one GPU" if spec.tensor_parallel_size == 1 else f"{spec.tensor_parallel_size} GPUs"
        unused = f"each engine requests {spec.gpus} GPUs and uses {used.split()[0]}; request {used} in resources.limits"
        return Judged(type, "True", Reason.GPUS_UNUSED, f"{situation.ready_count}; {unused}")
    return Judged(type, "True", Reason.REPLICAS_READY, situation.ready_count)


def judge_endpoint(situation: Situation) -> Judged:
    """Compute whether the gateway has an engine to send requests to. The gateway reads the same EndpointSlices."""
    count, type = situation.observed.ready_endpoints, ConditionType.ENDPOINT_READY
    if count > 0:
        return Judged(type, "True", Reason.ENDPOINTS_AVAILABLE, "the gateway has at least one ready engine")
    obstacle = situation.engine_service_obstacle
    if obstacle is not None:
        return Judged(type, "False", obstacle.reason, obstacle.message)
    if situation.wants_none:
        return Judged(type, "False", Reason.SCALED_TO_ZERO, "the service has 0 replicas; requests wait in the gateway")
    if situation.blocker is not None:
        return _blocked(type, situation.blocker)
    return Judged(type, "False", Reason.NO_READY_ENDPOINTS, "no engine is ready; requests wait in the gateway")


def judge_scaling_ready(situation: Situation) -> Judged:
    obstacle = situation.obstacle("HorizontalPodAutoscaler", "ScaledObject")
    if obstacle is not None:
        return Judged(ConditionType.SCALING_READY, "False", obstacle.reason, obstacle.message)
    judged = judge_scaling(situation.spec, situation.observed, situation.metrics_api, situation.serves_keda)
    is_gap = judged[1] == Reason.METRICS_UNAVAILABLE and situation.former.was_scaling
    if is_gap and is_short_gap(situation.observed.autoscaler, situation.now):
        return Judged(ConditionType.SCALING_READY, *SCALES)
    return Judged(ConditionType.SCALING_READY, *judged)


def judge_name(situation: Situation) -> Judged:
    return Judged(ConditionType.NAME_CLAIMED, *judge_claim(situation.name))


def judge_kstatus(ready: Judged, progressing: Judged, situation: Situation) -> list[Judged]:
    """Return `Reconciling` or `Stalled`, which kstatus and thus GitOps tools read; nothing if all is well.

    A failure that may pass is `Reconciling` until the Deployment exceeds its progress deadline, as kstatus treats
    Deployments. If all pods run the spec, a contested HPA, PodDisruptionBudget or Service is no failed rollout.
    """
    contested = progressing.reason == Reason.CONTESTED and situation.blocker is None
    rolled_out = contested or progressing.reason == Reason.UP_TO_DATE
    if rolled_out and ready.is_true:
        return []
    cause = ready if rolled_out else progressing
    late = situation.exceeds_deadline and not rolled_out
    stalls = not progressing.is_true and (cause.reason in STALLING_FAILURES or late)
    return [replace(cause, type=ConditionType.STALLED if stalls else ConditionType.RECONCILING, status="True")]


def _blocked(type: ConditionType, blocker: Blocker) -> Judged:
    return Judged(type, "False", blocker.reason, f"no engine is ready: {blocker.message}")


def _has_fetched(pod: PodState) -> bool:
    names = (FETCH_CONTAINER, DRAFT_CONTAINER)
    fetches = [container for container in pod.containers if container.name in names or container.adapter]
    return bool(fetches) and all(fetch.ended and fetch.exit_code == 0 for fetch in fetches)
