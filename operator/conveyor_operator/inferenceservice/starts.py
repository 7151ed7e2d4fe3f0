"""Measures how long a service's pods took to start and why, and derives the period of scale-up policies. Pure.

The results are kept in `memory` and reported in `status.effective`, from which a restarted operator continues.
`simulate` uses this module too.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from conveyor_api.autoscaling import LONGEST_PERIOD_SECONDS
from conveyor_api.quantities import parse_duration_seconds
from conveyor_api.status import NUM_POD_STARTS, EffectiveStatus, InferenceServiceStatus, LastStart
from conveyor_operator.inferenceservice.pods import PodState

UNKNOWN_START_SECONDS: Final = 300
"""Assumed duration of a start until the service's first pod has started. A large model takes this long."""
_LONGEST_WAIT_SECONDS: Final = 60
_STEP_SECONDS: Final = 20
_MOST_TOO_LONG: Final = 1.5


@dataclass(frozen=True, slots=True)
class PodStart:
    """One start of a pod."""

    pod: str
    uid: str
    seconds: Mapping[str, int]
    """`total`, from creation to Ready, and its known parts, named as in `LastStart`."""

    def with_warm_up(self, reported_seconds: float | None) -> "PodStart":
        """Return the start with the part `warm_up`, which is taken out of `load` and is at most as long as `load`."""
        load = self.seconds.get("load")
        if reported_seconds is None or load is None:
            return self
        warm_up = round(min(reported_seconds, load))
        return replace(self, seconds={**self.seconds, "load": load - warm_up, "warm_up": warm_up})


class PodStarts:
    """The last starts, from a pod's creation to Ready. Each pod is measured once, even if it becomes Ready again."""

    def __init__(self, previous: InferenceServiceStatus | None = None, pods: Iterable[PodState] = ()) -> None:
        """previous: the previous status. If it has any starts, the Ready ones of `pods` count as measured."""
        previous = previous or InferenceServiceStatus()
        effective, ready = previous.effective or EffectiveStatus(), [pod for pod in pods if pod.ready]
        self.seconds = [round(parse_duration_seconds(start)) for start in effective.pod_starts or ()]
        self._period_seconds = round(parse_duration_seconds(effective.scale_up_period or "0s"))
        self._measured = {pod.name for pod in ready} if self.seconds else set()
        self.last = _find_unreported(previous.last_start, ready)
        """The last measured start. Initially the one in the status if its warm-up is missing, otherwise None."""

    def see(self, pods: Iterable[PodState]) -> list[PodStart]:
        """Record the starts of pods that have become Ready, and return them."""
        ready = {pod.name: pod for pod in pods if pod.ready}
        new = [pod for pod in ready.values() if pod.name not in self._measured]
        starts = [start for pod in sorted(new, key=lambda pod: pod.ready_at) if (start := _measure(pod)) is not None]
        for start in starts:
            self.last = start
            self.add(start.seconds["total"])
        self._measured = self._measured & {pod.name for pod in pods} | ready.keys()
        return starts

    def describe_warm_up(self, start: PodStart, reported_seconds: float | None) -> PodStart:
        """Add the warm-up time, which the engine has reported, to a start. Returns the result."""
        whole = start.with_warm_up(reported_seconds)
        if self.last is start:
            self.last = whole
        return whole

    def add(self, seconds: int) -> None:
        self.seconds = [*self.seconds, seconds][-NUM_POD_STARTS:]

    def choose_period(self, queue_timeout_seconds: float) -> int:
        """Return the period of scale-up policies: the slowest of the last starts plus two queue time-outs, in seconds.

        Each time-out counts as at most a minute, and the sum is rounded up. Before this time has passed, the queue does
        not show whether the last scale-up was enough. The previous period is kept if it is long enough, and at most
        _MOST_TOO_LONG times the new one.
        """
        start_seconds = max(self.seconds, default=UNKNOWN_START_SECONDS)
        seconds = start_seconds + 2 * min(queue_timeout_seconds, _LONGEST_WAIT_SECONDS)
        wanted = min(math.ceil(seconds / _STEP_SECONDS) * _STEP_SECONDS, LONGEST_PERIOD_SECONDS)
        if not wanted <= self._period_seconds <= _MOST_TOO_LONG * wanted:
            self._period_seconds = wanted
        return self._period_seconds


def _find_unreported(last: LastStart | None, ready: Iterable[PodState]) -> PodStart | None:
    """Return the start in the status if its warm-up is missing and the pod is Ready, so the engine can be asked."""
    pod = next((pod for pod in ready if last is not None and pod.name == last.pod_name), None)
    if last is None or pod is None or last.warm_up is not None:
        return None
    parts = last.model_dump(exclude={"pod_name"}, exclude_none=True)
    return PodStart(pod.name, pod.uid, {part: round(parse_duration_seconds(taken)) for part, taken in parts.items()})


def _measure(pod: PodState) -> PodStart | None:
    """Return the pod's start, or None if the clocks disagree."""
    fetch = next((container for container in pod.containers if container.initial), None)
    begun, fetched = (fetch.started_at, fetch.ended_at) if fetch is not None else ("", "")
    fetched = max(fetched, *(container.ended_at for container in pod.containers if container.adapter), "")
    parts = {
        "total": _seconds(pod.created_at, pod.ready_at),
        "schedule": _seconds(pod.created_at, pod.scheduled_at),
        "image": _seconds(pod.scheduled_at, begun),
        "model": _seconds(begun, fetched),
        "load": _seconds(fetched, pod.ready_at),
    }
    seconds = {part: value for part, value in parts.items() if value is not None}
    return PodStart(pod.name, pod.uid, seconds) if "total" in seconds else None


def _seconds(begin: str, end: str) -> int | None:
    """Return the seconds between two times of Kubernetes; None if one is missing, or they are in the wrong order."""
    try:
        taken = (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()
    except ValueError:
        return None
    return round(taken) if taken >= 0 else None
