"""Waiting requests that can no longer meet their deadlines. Used by `scheduler`. Pure: the clock is an argument.

A request needs so many steps at least, and each takes as long as the fastest so far, at least. Nothing is predicted
beyond that, so nobody is dropped who could have been in time at the best pace that was seen. Each call costs by what is
dropped, and by the logarithm of what waits.
"""

import math
from collections.abc import Iterator
from typing import Final

from conveyor_engine.scheduling.ordered import Ordered
from conveyor_engine.scheduling.request_state import RequestState

_FEWEST_STEPS: Final = 16  # before the fastest of them says anything


class Pace:
    """The fastest step so far, from the times at which steps were planned."""

    def __init__(self) -> None:
        self._planned_at: float | None = None
        self._num_steps = 0
        self._fastest = math.inf

    def observe(self, now: float) -> None:
        """Called before each step is planned. The one before took no longer than until `now`."""
        if self._planned_at is not None:
            self._num_steps += 1
            self._fastest = min(self._fastest, now - self._planned_at)

    def plan(self, now: float, planned: bool) -> None:
        """Whether a step was planned now."""
        self._planned_at = now if planned else None

    @property
    def step_seconds(self) -> float:
        """What a step takes at least; 0 until enough steps were seen."""
        return self._fastest if self._num_steps >= _FEWEST_STEPS else 0.0


class Deadlines:
    """Requests that were never admitted, by the latest moment at which they may begin."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._waiting = Ordered[RequestState]()

    def add(self, request: RequestState) -> None:
        """The request waits. Without a deadline it may begin at any time."""
        if request.deadline < math.inf:
            self._waiting.put(request, (self._latest_start(request),))

    def remove(self, request: RequestState) -> None:
        """The request waits no longer. Does nothing if it is not here."""
        if request in self._waiting:
            self._waiting.remove(request)

    def next_at(self) -> float:
        """When the next request is too late."""
        return self._waiting.first_key[0] if len(self._waiting) else math.inf

    def pop_late(self, now: float) -> Iterator[tuple[RequestState, str]]:
        """Requests that cannot be in time any more, and why."""
        while self.next_at() <= now:
            request = next(iter(self._waiting))
            latest = self._latest_start(request)
            if latest > now:  # steps have become faster
                self._waiting.put(request, (latest,))
                continue
            self._waiting.remove(request)
            yield request, _explain(request.deadline - now, request.deadline - latest)

    def _latest_start(self, request: RequestState) -> float:
        return request.deadline - request.num_steps_least * self.pace.step_seconds


def _explain(left: float, needed: float) -> str:
    if left <= 0:
        return "the request's time ran out while it waited for a batch"
    return f"the request has {left:.3g} s left and would take {needed:.3g} s at least: it was not begun"
