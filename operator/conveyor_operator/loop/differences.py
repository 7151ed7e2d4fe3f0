"""Finds children that are missing, changed, unwanted, or whose names are taken. Pure.

Used by each resource's plan. Level-triggered: nothing here knows which event caused the call.
"""

from collections.abc import Iterable, Iterator, Mapping

from conveyor_api.conditions import Reason
from conveyor_operator.loop.child import Child, ChildId, hash_of, id_of
from conveyor_operator.loop.owner import Object, Owner
from conveyor_operator.loop.steps import Applied, Apply, Delete, Memory, Obstacle

Children = Mapping[ChildId, Child]


def find_applies(owner: Owner, desired: Iterable[Object], children: Children, memory: Memory) -> list[Apply]:
    """Return an apply for each desired child that is missing, changed or drifted, unless its name is taken.

    A child needs no apply if the operator sent the same body before and the result is still unchanged. Within one
    reconcile each child is applied only once, because an admission webhook may alter the body each time. A contested
    child is not restored during its pause, but a change of the spec is applied.
    """
    applies = []
    done = {step.id for step in memory.done if isinstance(step, Apply)}
    for body in desired:
        id = id_of(body)
        child = children.get(id)
        if id in memory.refused or id in done or (child is not None and find_obstacle(owner, child) is not None):
            continue
        applied = memory.applied.get(id)
        if id in memory.paused and applied is not None and applied.sent == hash_of(body):
            continue
        if reason := _why_apply(body, child, applied):
            applies.append(Apply(body, reason))
    return applies


def recall_applied(desired: Iterable[Object], children: Children, memory: Memory) -> None:
    """Take over the applies of a previous operator, if its bodies are still desired and the children are unchanged."""
    former, memory.former_hash = memory.former_hash, ""
    if former:
        found = {
            id: Applied(hash_of(body), children[id].fingerprint) for body in desired if (id := id_of(body)) in children
        }
        if hash_applied(found) == former:
            memory.applied = found


def hash_applied(applied: Mapping[ChildId, Applied]) -> str:
    """Return a hash of the sent bodies and of the resulting children; "" if nothing was applied."""
    return hash_of(sorted((*id, each.sent, each.fingerprint) for id, each in applied.items())) if applied else ""


def find_obstacles(owner: Owner, desired: Iterable[Object], children: Children) -> list[Obstacle]:
    """Return an obstacle for each desired child whose name is taken."""
    there = [children[id_of(body)] for body in desired if id_of(body) in children]
    return [obstacle for child in there if (obstacle := find_obstacle(owner, child)) is not None]


def find_obstacle(owner: Owner, child: Child) -> Obstacle | None:
    """Return why a child's name is taken; None if the object is the owner's, or has only lost its owner reference."""
    if child.controller_uid == owner.uid:
        return None
    kind = owner.kind.kind
    if (child.controller_group, child.controller) == (owner.kind.group, f"{kind}/{owner.name}"):
        message = f"{child.kind} {child.name} belongs to a deleted {kind} of this name; waiting for garbage collection"
        return Obstacle(child.kind, child.name, Reason.CHILD_NOT_OWNED, message, temporary=True)
    if not child.controller_uid and all(child.labels.get(key) == value for key, value in owner.labels.items()):
        return None
    group = f" of {child.controller_group}" if child.controller.startswith(f"{kind}/") else ""
    whose = f"belongs to {child.controller}{group}" if child.controller else "was not created by Conveyor"
    message = f"{child.kind} {child.name} already exists and {whose}. Delete it, or use another name for the {kind}."
    return Obstacle(child.kind, child.name, Reason.CHILD_NOT_OWNED, message)


def find_contested(memory: Memory) -> list[Obstacle]:
    """Return an obstacle for each contested child, for the status. No plan stops for it."""
    return [Obstacle(*id, Reason.CONTESTED, contest.cause) for id, contest in memory.open_contests.items()]


def find_unwanted(owner: Owner, desired: Iterable[Object], children: Children) -> Iterator[Delete]:
    """Yield a delete for each child that belongs to the owner and is not desired."""
    wanted = {id_of(body) for body in desired}
    for id, child in children.items():
        if id not in wanted and child.controller_uid == owner.uid:
            yield Delete(id, child.uid)


def is_restored(apply: Apply, before: Child | None, former: Applied | None, applied: Applied) -> bool:
    """Return whether an apply of the same body as before has undone an edit of the child."""
    if former is None or former.sent != applied.sent:
        return False
    return before is None or before.fingerprint != applied.fingerprint or _replicas_drifted(apply.body, before)


def _why_apply(body: Object, child: Child | None, applied: Applied | None) -> str:
    """Return the reason for an apply; "" if none is needed."""
    if child is None:
        return "created"
    if applied is None:
        return "checked"
    if applied.sent != hash_of(body):
        return "changed"
    return "drifted" if applied.fingerprint != child.fingerprint or _replicas_drifted(body, child) else ""


def _replicas_drifted(body: Object, child: Child) -> bool:
    requested = (body.get("spec") or {}).get("replicas")
    return requested is not None and child.replicas is not None and requested != child.replicas
