"""Finds waiting requests that can no longer meet their deadlines. Used by `scheduler`. Pure: the clock is an argument.

A request needs a minimum number of steps, and each step is assumed to take at least as long as the fastest of the last
steps. So a busy engine begins no request that would end late at the present pace, and keeps its rows for others. The
time of a call depends on the number of dropped requests, and on the logarithm of the number of waiting requests.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Final

from conveyor_engine.scheduling.ordered import Ordered
from conveyor_engine.scheduling.request_state import RequestState

_FEWEST_STEPS: Final = 16  # how many steps must have run before the fastest one is used
_LAST_STEPS: Final = 32  # among which the fastest one is the present pace


class Pace:
    """The time of the fastest of the last steps, from the times at which steps were planned.

    Until there are enough of them since the engine was idle, it is the time of the fastest step of all.
    """

    def __init__(self) -> None:
        self._planned_at: float | None = None
        self._num_steps = 0
        self._fastest = math.inf
        self._last = deque[float](maxlen=_LAST_STEPS)

    def observe(self, now: float) -> None:
        """Measure the previous step, which has ended by `now`. Call this before each step is planned."""
        if self._planned_at is not None:
            self._num_steps += 1
            self._last.append(now - self._planned_at)
            self._fastest = min(self._fastest, self._last[-1])

    def plan(self, now: float, planned: bool) -> None:
        """Record whether a step was planned at `now`."""
        self._planned_at = now if planned else None

    def forget_last(self) -> None:
        """Forget the last steps, because the engine has been idle and the next ones will have fewer rows."""
        self._planned_at = None
        self._last.clear()

    @property
    def step_seconds(self) -> float:
        """The time that a step takes at least; 0 until enough steps have run."""
        if len(self._last) == _LAST_STEPS:
            return min(self._last)
        return self._fastest if self._num_steps >= _FEWEST_STEPS else 0.0


class Deadlines:
    """Requests that were never admitted, ordered by the latest time at which they may begin."""

    def __init__(self, tokens_per_step: int = 1) -> None:
        """tokens_per_step: the most tokens that a step can add to one answer."""
        self.pace = Pace()
        self._tokens_per_step = tokens_per_step
        self._waiting = Ordered[RequestState]()

    def add(self, request: RequestState) -> None:
        """Add a waiting request. A request without a deadline is ignored."""
        if request.deadline < math.inf:
            self._waiting.put(request, (self._latest_start(request),))

    def remove(self, request: RequestState) -> None:
        """Remove a request that no longer waits. Does nothing if it is not here."""
        if request in self._waiting:
            self._waiting.remove(request)

    def next_at(self) -> float:
        """Return the time at which the next request becomes too late."""
        return self._waiting.first_key[0] if len(self._waiting) else math.inf

    def pop_late(self, now: float) -> Iterator[tuple[RequestState, str]]:
        """Remove and return the requests that can no longer meet their deadlines, each with the reason."""
        while self.next_at() <= now:
            request = next(iter(self._waiting))
            latest = self._latest_start(request)
            if latest > now:  # steps have become faster since
                self._waiting.put(request, (latest,))
                continue
            self._waiting.remove(request)
            yield request, _explain(request.deadline - now, request.deadline - latest)

    def _latest_start(self, request: RequestState) -> float:
        return request.deadline - request.count_steps_least(self._tokens_per_step) * self.pace.step_seconds


def _explain(left: float, needed: float) -> str:
    if left <= 0:
        return "the request's time ran out while it waited for a batch"
    return f"the request has {left:.3g} s left and would take {needed:.3g} s at the present pace: it was not begun"
