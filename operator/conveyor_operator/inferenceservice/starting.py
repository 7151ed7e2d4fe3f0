"""Counts the pods that are expected to be ready soon. Pure; used by `desired`, `status` and `conveyor_insight`.

The metrics server leaves out the requests for which these pods have places
(docs/adr/0129-starting-engines-have-places.md). A pod that fails has none, or it would hold up scaling for ever.
"""

import math
from collections.abc import Iterable
from datetime import datetime, timedelta

from conveyor_api.conditions import Reason
from conveyor_operator.inferenceservice.failures import find_failure
from conveyor_operator.inferenceservice.pods import PodState

# An autoscaler of nodes may add a node for the pod.
_MAY_PASS = (Reason.INSUFFICIENT_GPU, Reason.UNSCHEDULABLE)


def count_starting(pods: Iterable[PodState], ready_replicas: int, period_seconds: int, now: datetime) -> int:
    """Return the number of pods that are not ready, have no failure, and make progress.

    A pod makes progress while one of its containers runs, because the kubelet ends a container that does not start.
    Until then, the pod has `period_seconds` since its creation, for example to find a node.
    A pod that became ready counts until `ready_replicas` of the Deployment has it, which is after the gateways see it.
    Otherwise its places would be missing for a moment.
    """
    return max(0, sum(_is_healthy(pod, period_seconds, now) for pod in pods) - ready_replicas)


def _is_healthy(pod: PodState, period_seconds: int, now: datetime) -> bool:
    if pod.ready:
        return not pod.leaving
    return _may_start(pod) and (_runs(pod) or _find_end(pod, period_seconds) > now)


def find_lapse(pods: Iterable[PodState], period_seconds: int, now: datetime) -> datetime | None:
    """Return until when gateways may use the count; None without a pod that starts.

    While the operator is down, nobody sees that a pod has failed. Then its places last until this time at most.
    """
    counted = (pod for pod in pods if _may_start(pod) and _is_healthy(pod, period_seconds, now))
    return max((_find_lapse(pod, period_seconds, now) for pod in counted), default=None)


def find_next_end(pods: Iterable[PodState], period_seconds: int, now: datetime) -> datetime | None:
    """Return when the first of the counted pods no longer counts, or the lapse of the count has to be extended.

    The lapse is extended half a period before it, so that the gateways see the new one in time.
    """
    lapses = ((_runs(pod), _find_lapse(pod, period_seconds, now)) for pod in pods if _may_start(pod))
    ends = (lapse - timedelta(seconds=period_seconds / 2) if runs else lapse for runs, lapse in lapses)
    return min((end for end in ends if end > now), default=None)


def _may_start(pod: PodState) -> bool:
    if pod.ready or pod.leaving or pod.phase in ("Failed", "Succeeded"):
        return False
    failure = find_failure(pod)
    return failure is None or failure.reason in _MAY_PASS


def _runs(pod: PodState) -> bool:
    return any(container.running for container in pod.containers)


def _find_end(pod: PodState, period_seconds: int) -> datetime:
    return datetime.fromisoformat(pod.created_at) + timedelta(seconds=period_seconds)


def _find_lapse(pod: PodState, period_seconds: int, now: datetime) -> datetime:
    """Return the pod's end. If a container runs: a multiple of the period, between a half and one and a half later."""
    if not _runs(pod):
        return _find_end(pod, period_seconds)
    created, period = datetime.fromisoformat(pod.created_at), timedelta(seconds=period_seconds)
    return created + period * (math.floor((now - created) / period + 0.5) + 1)


def describe_places(starting: int, batch_size: int) -> str:
    """Return how many places starting engines have, as words."""
    engines = "1 starting engine has" if starting == 1 else f"{starting} starting engines have"
    return f"{engines} {starting * batch_size} place{'s' * (starting * batch_size != 1)}"
