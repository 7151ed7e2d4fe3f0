"""What has to be done to the children of one InferenceService: which applies, which deletes, and why. Pure.

`reconcile` asks `plan_applies` with what it built and observed, executes, and asks `plan_removals` with what is
there afterwards. Level-triggered: nothing here knows which event led to the call.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conveyor_api import names
from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.kinds import CHILDREN
from conveyor_operator.inferenceservice.manifests.metadata import Owner
from conveyor_operator.inferenceservice.observed import Child, Observed, hash_of
from conveyor_operator.kinds import AUTOSCALER, CLAIM, CONFIG_MAP, DEPLOYMENT

ChildId = tuple[str, str]
"""(kind, name)"""

_ORDER = {kind.kind: position for position, kind in enumerate(CHILDREN)}


@dataclass(frozen=True, slots=True)
class Applied:
    """What we sent last and what the API server made of it, both as hashes."""

    sent: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply one child; `reason` is for the log: created, checked (first look of this process), changed
    (by the spec) or drifted (by somebody else)."""

    body: dict[str, Any]
    reason: str

    @property
    def id(self) -> ChildId:
        return str(self.body["kind"]), str(self.body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly this object, not one that came in its place."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A child that cannot be applied; `temporary` if waiting is all it takes."""

    kind: str
    name: str
    reason: Reason
    message: str
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Applies:
    """In the order of execution, and what stands in the way of the others."""

    applies: tuple[Apply, ...]
    obstacles: tuple[Obstacle, ...]


def plan_applies(
    owner: Owner, desired: Iterable[dict[str, Any]], observed: Observed, applied: Mapping[ChildId, Applied]
) -> Applies:
    """Every desired child that is missing, changed, or not as we left it.

    An apply is skipped only if we sent the same before and the child still is what came of it.
    """
    applies: list[Apply] = []
    obstacles: list[Obstacle] = []
    for body in sorted(desired, key=lambda body: _ORDER[body["kind"]]):
        id = (str(body["kind"]), str(body["metadata"]["name"]))
        child = observed.children.get(id)
        obstacle = find_obstacle(owner, child) if child is not None else None
        if obstacle is not None:
            obstacles.append(obstacle)
        elif reason := _why_apply(body, child, observed, applied.get(id)):
            applies.append(Apply(body, reason))
    return Applies(tuple(applies), tuple(obstacles))


def find_obstacle(owner: Owner, child: Child) -> Obstacle | None:
    """Why a name that we need is taken; None if the object is ours, or was and lost its owner."""
    if child.controller_uid == owner.uid:
        return None
    if child.controller == f"{names.KIND}/{owner.name}":
        message = f"{child.kind} {child.name} still belongs to a deleted InferenceService of this name"
        return Obstacle(child.kind, child.name, Reason.CHILD_NOT_OWNED, message, temporary=True)
    ours = names.child_labels(owner.name)
    if not child.controller_uid and all(child.labels.get(key) == value for key, value in ours.items()):
        return None
    whose = f"belongs to {child.controller}" if child.controller else "was not made by Conveyor"
    message = (
        f"{child.kind} {child.name} exists and {whose}. Give the InferenceService another name, or remove that object."
    )
    return Obstacle(child.kind, child.name, Reason.CHILD_NOT_OWNED, message)


def without_aimless_autoscaler(owner: Owner, desired: list[dict[str, Any]], observed: Observed) -> list[dict[str, Any]]:
    """Without the HPA while the Deployment that it would scale is not ours."""
    deployment = observed.children.get((DEPLOYMENT.kind, names.engine_name(owner.name)))
    if deployment is None or find_obstacle(owner, deployment) is None:
        return desired
    return [body for body in desired if body["kind"] != AUTOSCALER.kind]


def plan_early_removals(owner: Owner, desired: Iterable[dict[str, Any]], observed: Observed) -> tuple[Delete, ...]:
    """An HPA that is not wanted goes before the Deployment is applied, or the two fight over replicas."""
    return tuple(r for r in _unwanted(owner, desired, observed) if r.kind == AUTOSCALER.kind)


def plan_removals(owner: Owner, desired: Iterable[dict[str, Any]], observed: Observed) -> tuple[Delete, ...]:
    """Children of ours that are not wanted any more and that no pod needs. `observed`: after the applies.

    Configurations and claims of former pods stay until the new pods have proven to be available.
    """
    deployment = observed.deployment
    settled = deployment is not None and deployment.complete
    used = {pod.config_hash for pod in observed.pods}
    used |= {deployment.config_hash} if deployment is not None else set()
    return tuple(
        removal
        for removal in _unwanted(owner, desired, observed)
        if not (
            (removal.kind == CONFIG_MAP.kind and (not settled or removal.name.rpartition("-")[2] in used))
            or (removal.kind == CLAIM.kind and not settled)
        )
    )


def _unwanted(owner: Owner, desired: Iterable[dict[str, Any]], observed: Observed) -> Iterable[Delete]:
    wanted = {(body["kind"], body["metadata"]["name"]) for body in desired}
    for id, child in observed.children.items():
        if id not in wanted and child.controller_uid == owner.uid:
            yield Delete(child.kind, child.name, child.uid)


def _why_apply(body: dict[str, Any], child: Child | None, observed: Observed, applied: Applied | None) -> str | None:
    if child is None:
        return "created"
    if applied is None:
        return "checked"
    if applied.sent != hash_of(body):
        return "changed"
    if applied.fingerprint != child.fingerprint or _replicas_drifted(body, observed):
        return "drifted"
    return None


def is_restored(apply: Apply, before: Observed, former: Applied | None, applied: Applied) -> bool:
    """Whether an apply of what we had sent `before` has undone what somebody else did to the child."""
    if former is None or former.sent != applied.sent:
        return False
    child = before.children.get(apply.id)
    return child is None or child.fingerprint != applied.fingerprint or _replicas_drifted(apply.body, before)


def _replicas_drifted(body: dict[str, Any], observed: Observed) -> bool:
    if body["kind"] != "Deployment" or observed.deployment is None:
        return False
    asked = body["spec"].get("replicas")
    return asked is not None and asked != observed.deployment.asked_replicas
