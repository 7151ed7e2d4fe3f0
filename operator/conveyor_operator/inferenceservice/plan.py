"""What has to be done next to the children of one InferenceService. Pure.

`loop.reconcile` asks `plan` with what is desired, observed and remembered, executes, and asks again, until only a
`RequeueAt` is left, or nothing.
"""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from conveyor_api import names
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.desired import Desired
from conveyor_operator.inferenceservice.kinds import CHILDREN
from conveyor_operator.inferenceservice.memory import ServiceMemory
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.replicas import (
    Handover,
    plan_fixed,
    plan_hold,
    plan_replicas,
    plan_zero,
    with_replicas,
)
from conveyor_operator.inferenceservice.rollout import PATIENCE
from conveyor_operator.inferenceservice.wording import explain_refusal
from conveyor_operator.kinds import AUTOSCALER, CLAIM, CONFIG_MAP, DEPLOYMENT, JOB, SCALED_OBJECT, SERVICE_ACCOUNT
from conveyor_operator.loop.child import Child
from conveyor_operator.loop.differences import find_applies, find_obstacle, find_obstacles, find_unwanted, id_of
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Delete, Hold, Obstacle, RequeueAt, Step

AUTOSCALERS = (AUTOSCALER.kind, SCALED_OBJECT.kind)
POD_NEEDS = (SERVICE_ACCOUNT.kind, CLAIM.kind, CONFIG_MAP.kind, JOB.kind)

_ORDER = {kind.kind: position for position, kind in enumerate(CHILDREN)}
_REQUEUE = (timedelta(seconds=0.25), timedelta(minutes=1))


def plan(desired: Desired, observed: Observed, memory: ServiceMemory, activity: Activity, now: datetime) -> list[Step]:
    """The next steps, in their order. Each stage is planned by what the one before has left."""
    if removals := _plan_early_removals(desired, observed):
        return removals
    wanted = _find_wanted(desired, observed, memory)
    applies: list[Step] = list(find_applies(desired.owner, wanted, observed.children, memory))
    obstacles = find_all_obstacles(desired, observed, memory)
    if before := [step for step in applies if _position(step) < 0]:
        return before
    if not any(obstacle.kind in POD_NEEDS for obstacle in obstacles) and not is_prewarming(desired, observed):
        deployment = [step for step in applies if _position(step) == 0]
        if hold := _plan_hold(desired, observed, memory, applied_next=bool(deployment)):
            deployment.insert(0, hold)
        if deployment:
            return deployment
    if after := [step for step in applies if _position(step) > 0]:
        return after
    if hold := _build_hold(desired, observed, memory, _plan_scaling(desired, observed, memory, activity)):
        return [hold]
    if not obstacles:
        podless = _find_podless(desired, observed)
        times = (desired.look_again_at, None if podless is None else _end_of_patience(podless))
        return _plan_removals(desired, observed) or [RequeueAt(at) for at in times if at and at > now]
    return _plan_requeue(desired, observed, memory, now)


def is_prewarming(desired: Desired, observed: Observed) -> bool:
    """A Job has to end before pods of this spec are made; those that are there stay as they are."""
    live = observed.deployment
    if live is not None and live.template_hash == desired.template_hash:
        return False
    return not all(job is not None and job.done for job in _find_jobs(desired, observed))


def find_podless_job(desired: Desired, observed: Observed, now: datetime) -> str:
    """Name of the Job that has had no pod for longer than one takes to be made; empty if there is none."""
    job = _find_podless(desired, observed)
    return job.name if job is not None and _end_of_patience(job) <= now else ""


def find_all_obstacles(desired: Desired, observed: Observed, memory: ServiceMemory) -> list[Obstacle]:
    """Names that are taken, and calls that have failed in this reconcile."""
    taken = find_obstacles(desired.owner, _without_aimless_autoscaler(desired, observed), observed.children)
    source = desired.spec.model.source
    refused = [replace(each, message=explain_refusal(each.message, source)) for each in memory.refused.values()]
    return [*taken, *refused]


def _find_jobs(desired: Desired, observed: Observed) -> list[Child | None]:
    return [observed.children.get(id_of(child)) for child in desired.children if child["kind"] == JOB.kind]


def _find_podless(desired: Desired, observed: Observed) -> Child | None:
    jobs = _find_jobs(desired, observed) if is_prewarming(desired, observed) else []
    return next((job for job in jobs if job is not None and job.without_pods_since), None)


def _end_of_patience(podless: Child) -> datetime:
    return datetime.fromisoformat(podless.without_pods_since) + PATIENCE


def _plan_early_removals(desired: Desired, observed: Observed) -> list[Step]:
    """An unwanted autoscaler is deleted before the Deployment is applied, since both would set the replicas."""
    left = _without_aimless_autoscaler(desired, observed)
    unwanted = find_unwanted(desired.owner, left, observed.children)
    removals: list[Step] = [removal for removal in unwanted if removal.id[0] in AUTOSCALERS]
    return [*removals, *_plan_kedas_removal(desired, observed)]


def find_kedas_autoscaler(desired: Desired, observed: Observed) -> Child | None:
    """The HPA of our name that KEDA has made, of whosever ScaledObject."""
    name = names.engine_name(desired.owner.name)
    child = observed.children.get((AUTOSCALER.kind, name))
    return child if child is not None and child.controller == f"{SCALED_OBJECT.kind}/{name}" else None


def _plan_kedas_removal(desired: Desired, observed: Observed) -> Iterator[Delete]:
    """What KEDA has made of a ScaledObject of ours that is not wanted any more: it would go with that, once KEDA has
    finished with it, or never where KEDA is gone."""
    spec, child = desired.spec, find_kedas_autoscaler(desired, observed)
    if child is None or (spec.autoscaling and spec.autoscaling.uses_keda):
        return
    scaled_object = observed.children.get((SCALED_OBJECT.kind, child.name))
    if scaled_object is None or scaled_object.controller_uid == desired.owner.uid:
        yield Delete((child.kind, child.name), child.uid)


def _plan_hold(desired: Desired, observed: Observed, memory: ServiceMemory, applied_next: bool) -> Hold | None:
    """Keeps the number of replicas while the field changes hands: before the apply that lets go of it, and after the
    one that has created the Deployment."""
    live = observed.deployment
    if live is None or not (applied_next or not live.replicas_managers):
        return None
    return _build_hold(desired, observed, memory, plan_hold(desired.spec, live, memory.former_replicas))


def _build_hold(desired: Desired, observed: Observed, memory: ServiceMemory, handover: Handover | None) -> Hold | None:
    """None where it was done in this reconcile, was refused, or the Deployment is not ours."""
    if handover is None:
        return None
    id = (DEPLOYMENT.kind, names.engine_name(desired.owner.name))
    child, hold = observed.children.get(id), Hold(id, handover.count, handover.force)
    is_ours = child is not None and find_obstacle(desired.owner, child) is None
    return hold if is_ours and id not in memory.refused and hold not in memory.done else None


def _plan_scaling(desired: Desired, observed: Observed, memory: ServiceMemory, activity: Activity) -> Handover | None:
    """To zero and from it; and a number of the spec's while the Deployment's apply waits for a Job."""
    if is_prewarming(desired, observed) and desired.spec.autoscaling is None:
        replicas = plan_replicas(desired.spec, observed.deployment, memory.had_autoscaler)
        return plan_fixed(replicas, observed.deployment)
    return plan_zero(desired.spec, observed.deployment, activity)


def _plan_removals(desired: Desired, observed: Observed) -> list[Step]:
    """Children of ours that are not wanted any more and that no pod needs.

    Configurations and claims of former pods stay until the new pods have proven to be available.
    """
    deployment = observed.deployment
    settled = deployment is not None and deployment.complete and not is_prewarming(desired, observed)
    used = {pod.config_hash for pod in observed.pods}
    used |= {deployment.config_hash} if deployment is not None else set()

    def is_needed(removal: Delete) -> bool:
        kind, name = removal.id
        if kind == CONFIG_MAP.kind:
            return not settled or name.rpartition("-")[2] in used
        return kind == CLAIM.kind and not settled

    unwanted = find_unwanted(desired.owner, desired.children, observed.children)
    return [removal for removal in unwanted if not is_needed(removal)]


def _plan_requeue(desired: Desired, observed: Observed, memory: ServiceMemory, now: datetime) -> list[Step]:
    """Asks for another reconcile: no watch reports when another owner's object is deleted."""
    if len(find_all_obstacles(desired, observed, memory)) == len(memory.refused):
        return []  # failed calls are tried again with a backoff
    shortest, longest = _REQUEUE
    waited = now - (memory.waiting_since or now)
    return [RequeueAt(now + min(longest, max(shortest, waited)))]


def _find_wanted(desired: Desired, observed: Observed, memory: ServiceMemory) -> list[Object]:
    """In the order in which they are applied, the Deployment with the replicas that are ours to set."""
    replicas = plan_replicas(desired.spec, observed.deployment, memory.had_autoscaler)

    def complete(child: Object) -> Object:
        return with_replicas(child, replicas) if child["kind"] == DEPLOYMENT.kind else child

    children = sorted(_without_aimless_autoscaler(desired, observed), key=lambda child: _ORDER[child["kind"]])
    return [complete(child) for child in children]


def _without_aimless_autoscaler(desired: Desired, observed: Observed) -> Iterator[Object]:
    """Without the autoscaler while the Deployment that it would scale is not ours."""
    deployment = observed.children.get((DEPLOYMENT.kind, names.engine_name(desired.owner.name)))
    aimless = deployment is not None and find_obstacle(desired.owner, deployment) is not None
    return (child for child in desired.children if not (aimless and child["kind"] in AUTOSCALERS))


def _position(step: Step) -> int:
    """Before the Deployment: below 0."""
    assert not isinstance(step, RequeueAt), "it has no child"
    return _ORDER[step.id[0]] - _ORDER[DEPLOYMENT.kind]
