"""Finds out whether a rollout has failed for good, and which ReplicaSet has the pod template to restore.

A rollout that removed old pods first and then fails leaves too few engines. The operator then restores the last pod
template with which engines were ready. The ReplicaSet of that template still exists: Kubernetes deletes it only after a
rollout is complete (docs/adr/0130). Pure; used by `desired`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from conveyor_api.conditions import LASTING_FAILURES, Reason
from conveyor_operator.inferenceservice.failures import find_failure, may_fit_later
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed, RolledBack
from conveyor_operator.inferenceservice.pods import PodState

_LASTING_PATIENCE: Final = timedelta(minutes=1)
"""For failures that usually last. A registry or a hub may be away for a moment."""
_ROOM_PATIENCE: Final = timedelta(minutes=5)
"""For a pod without a node or a quota. A cluster autoscaler may be adding a node."""
_LONG_AGO: Final = datetime.min.replace(tzinfo=UTC)
_MOST_RESTARTS: Final = 2
"""A container that has ended three times will end again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause`: the failure; None if the rollout has not failed for good. `look_again_at`: when it may have."""

    cause: RolledBack | None = None
    replica_set: str = ""
    """Name of the ReplicaSet with the pod template to restore."""
    look_again_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure, and the time from which it counts as one that lasts."""

    reason: str
    message: str
    lasts_from: datetime


def judge_rollout(observed: Observed, wanted: str, attempt: str, proven: str, now: datetime) -> Verdict:
    """Judge the rollout of the pod template with the hash `wanted`.

    attempt: see `RolledBack`. proven: hash of the last template with which engines were ready; "" without one.
    """
    live = observed.deployment
    if live is None or live.template_hash != wanted or proven in ("", wanted):
        return Verdict()
    if live.observed_generation < live.generation or live.available_replicas >= live.requested_replicas:
        return Verdict()
    former = next((each for each in observed.replica_sets if each.template_hash == proven), None)
    first = min(_find_failures(live, observed), key=lambda failure: failure.lasts_from, default=None)
    if former is None or first is None:
        return Verdict()
    if first.lasts_from > now:
        return Verdict(look_again_at=first.lasts_from)
    return Verdict(RolledBack(attempt, first.reason, first.message), former.name)


def find_rolled_back(live: DeploymentState | None, wanted: str, attempt: str) -> RolledBack | None:
    """Return why the Deployment keeps an earlier pod template; None if it has or must get the one with this hash."""
    if live is None or live.rolled_back is None or live.template_hash == wanted:
        return None
    return live.rolled_back if live.rolled_back.attempt == attempt else None


def _find_failures(live: DeploymentState, observed: Observed) -> Iterator[_Failure]:
    some_leave = any(pod.leaving for pod in observed.pods)
    for pod in observed.newest_pods:
        if not pod.ready and (failure := _judge_pod(pod, some_leave)) is not None:
            yield failure
    if observed.newest is not None and observed.newest.refused_since and not some_leave:
        since = datetime.fromisoformat(observed.newest.refused_since)
        yield _Failure(Reason.PODS_REFUSED, observed.refused, since + _ROOM_PATIENCE)
    _, reason, message = live.conditions.get("Progressing", ("", "", ""))
    if reason == Reason.PROGRESS_DEADLINE_EXCEEDED:
        yield _Failure(reason, message, _LONG_AGO)


def _judge_pod(pod: PodState, some_leave: bool) -> _Failure | None:
    found = find_failure(pod)
    if found is None or not pod.created_at:
        return None
    created, message = datetime.fromisoformat(pod.created_at), f"{found.message} (pod {pod.name})"
    if found.reason in LASTING_FAILURES:
        return _Failure(found.reason, message, created + _LASTING_PATIENCE)
    if found.reason in (Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE):
        since = datetime.fromisoformat(pod.unschedulable_at)
        if not may_fit_later(pod.unschedulable):
            return _Failure(found.reason, message, since + _LASTING_PATIENCE)
        return None if some_leave else _Failure(found.reason, message, since + _ROOM_PATIENCE)
    often = max((container.restarts for container in pod.containers), default=0) >= _MOST_RESTARTS
    return _Failure(found.reason, message, created) if often else None
