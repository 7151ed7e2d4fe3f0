"""Plans the next steps for the children of one InferenceService. Pure.

`loop.reconcile` calls `plan` with the desired and the observed state and the memory, and executes the steps. It repeats
this until only a `RequeueAt` or nothing is left.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

from conveyor_api import names
from conveyor_operator.activity.answer import Activity
from conveyor_operator.inferenceservice.desired import Desired
from conveyor_operator.inferenceservice.differences import (
    AUTOSCALERS,
    Differences,
    find_differences,
    find_kedas_autoscaler,
)
from conveyor_operator.inferenceservice.kinds import CHILDREN, POD_NEEDS
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
from conveyor_operator.kinds import CLAIM, CONFIG_MAP, DEPLOYMENT, SCALED_OBJECT
from conveyor_operator.loop.differences import find_applies, find_obstacle, find_unwanted, recall_applied
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Delete, Hold, RequeueAt, Step

_ORDER = {kind.kind: position for position, kind in enumerate(CHILDREN)}
_REQUEUE = (timedelta(seconds=0.25), timedelta(minutes=1))


def plan(desired: Desired, observed: Observed, memory: ServiceMemory, activity: Activity, now: datetime) -> list[Step]:
    """Return the next steps, in order. Each stage is planned from the state that the previous stage has left."""
    found = find_differences(desired, observed, memory)
    complete = _complete(found, memory)
    recall_applied(complete, observed.children, memory)
    if removals := _plan_early_removals(found):
        return removals
    applies: list[Step] = list(find_applies(desired.owner, complete, observed.children, memory))
    if before := [step for step in applies if _position(step) < 0]:
        return before
    if not any(obstacle.kind in POD_NEEDS for obstacle in found.obstacles) and not found.keeps_pods:
        deployment = [step for step in applies if _position(step) == 0]
        if hold := _plan_hold(found, memory, applied_next=bool(deployment)):
            deployment.insert(0, hold)
        if deployment:
            return deployment
    if after := [step for step in applies if _position(step) > 0]:
        return after
    if hold := _build_hold(found, memory, _plan_scaling(found, memory, activity)):
        return [hold]
    if not found.obstacles:
        times = (desired.look_again_at, found.end_of_patience)
        return _plan_removals(found) or [RequeueAt(at) for at in times if at and at > now]
    return _plan_requeue(found, memory, now)


def _plan_early_removals(found: Differences) -> list[Step]:
    """Return deletes for unwanted autoscalers. They must precede the Deployment's apply, which may set the replicas."""
    unwanted = find_unwanted(found.desired.owner, found.wanted, found.observed.children)
    removals: list[Step] = [removal for removal in unwanted if removal.id[0] in AUTOSCALERS]
    return [*removals, *_plan_kedas_removal(found.desired, found.observed)]


def _plan_kedas_removal(desired: Desired, observed: Observed) -> Iterator[Delete]:
    """Yield a delete for the HPA that KEDA created from a ScaledObject that is no longer wanted.

    Otherwise the HPA would stay until KEDA has finalized the ScaledObject, or forever if KEDA was removed.
    """
    spec, child = desired.spec, find_kedas_autoscaler(desired, observed)
    if child is None or (spec.autoscaling and spec.autoscaling.uses_keda):
        return
    scaled_object = observed.children.get((SCALED_OBJECT.kind, child.name))
    if scaled_object is None or scaled_object.controller_uid == desired.owner.uid:
        yield Delete((child.kind, child.name), child.uid)


def _plan_hold(found: Differences, memory: ServiceMemory, applied_next: bool) -> Hold | None:
    """Return the step that keeps the number of replicas while the owner of the field changes.

    It is needed before the apply that gives up the field, and after the apply that has created the Deployment.
    """
    live = found.observed.deployment
    if live is None or not (applied_next or not live.replicas_managers):
        return None
    return _build_hold(found, memory, plan_hold(found.desired.spec, live, memory.former_replicas))


def _build_hold(found: Differences, memory: ServiceMemory, handover: Handover | None) -> Hold | None:
    """Return the step that keeps the replicas. None if it is done or rejected, or the Deployment has another owner."""
    if handover is None:
        return None
    owner = found.desired.owner
    id = (DEPLOYMENT.kind, names.engine_name(owner.name))
    child, hold = found.observed.children.get(id), Hold(id, handover.count, handover.force)
    is_ours = child is not None and find_obstacle(owner, child) is None
    return hold if is_ours and id not in memory.refused and hold not in memory.done else None


def _plan_scaling(found: Differences, memory: ServiceMemory, activity: Activity) -> Handover | None:
    """Return the change of replicas to or from zero, or to the spec's number while the Deployment keeps its pods."""
    spec, live = found.desired.spec, found.observed.deployment
    if found.keeps_pods and spec.autoscaling is None:
        return plan_fixed(plan_replicas(spec, live, memory.had_autoscaler), live)
    return plan_zero(spec, live, activity)


def _plan_removals(found: Differences) -> list[Step]:
    """Return deletes for the service's children that are no longer wanted and that no pod needs.

    Configurations and claims of former pods stay until the new pods are available.
    """
    desired, observed = found.desired, found.observed
    deployment = observed.deployment
    wanted = deployment is not None and deployment.template_hash == desired.template_hash
    settled = deployment is not None and wanted and deployment.complete
    used = {pod.config_hash for pod in observed.pods}
    used |= {deployment.config_hash} if deployment is not None else set()

    def is_needed(removal: Delete) -> bool:
        kind, name = removal.id
        if kind == CONFIG_MAP.kind:
            return not settled or name.rpartition("-")[2] in used
        return kind == CLAIM.kind and not settled

    unwanted = find_unwanted(desired.owner, desired.children, observed.children)
    return [removal for removal in unwanted if not is_needed(removal)]


def _plan_requeue(found: Differences, memory: ServiceMemory, now: datetime) -> list[Step]:
    """Request another reconcile, because no watch reports when another owner's object is deleted."""
    if len(found.obstacles) == len(memory.refused):
        return []  # failed calls are tried again with a backoff
    shortest, longest = _REQUEUE
    waited = now - (memory.waiting_since or now)
    return [RequeueAt(now + min(longest, max(shortest, waited)))]


def _complete(found: Differences, memory: ServiceMemory) -> list[Object]:
    """Return the wanted children in the order of their apply. The Deployment has replicas if the operator owns them."""
    replicas = plan_replicas(found.desired.spec, found.observed.deployment, memory.had_autoscaler)

    def complete(child: Object) -> Object:
        return with_replicas(child, replicas) if child["kind"] == DEPLOYMENT.kind else child

    return [complete(child) for child in sorted(found.wanted, key=lambda child: _ORDER[child["kind"]])]


def _position(step: Step) -> int:
    """Return the position of the step's kind relative to the Deployment; below 0: before the Deployment."""
    assert not isinstance(step, RequeueAt), "a RequeueAt has no child"
    return _ORDER[step.id[0]] - _ORDER[DEPLOYMENT.kind]
