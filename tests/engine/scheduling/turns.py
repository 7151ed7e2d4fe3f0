"""Checks whose turn it was: the order that random histories expect of the waiting queue."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import count, takewhile

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS


class Turns:
    """Decides who may be admitted next. By round robin, the party whose last turn was longest ago goes first.

    It yields to better levels as long as it must, and to those with less time until their deadline.
    A party whose first request comes is behind all others. Where batches are `by_length`, parties take turns for those
    of each length; a turn at one length is one at all.
    """

    def __init__(self, *, by_length: bool, share_levels: Iterable[int] = ()) -> None:
        """share_levels: requests of such a level, or a worse one, may be passed over by requests with fewer limits."""
        self._by_length = by_length
        self._share_levels = list(share_levels)
        self._events = count()
        self._last: dict[str, tuple[float, int]] = {}  # when a party had a turn, or came
        self._newest: defaultdict[int, float] = defaultdict(float)  # arrival by level
        self._waiting: dict[str, RequestState] = {}  # that have never been admitted, in order of arrival
        self.admitted: list[str] = []  # in this order, each once
        self.num_yielded = 0  # requests that came before one of a better level, and were admitted later
        self.num_overtaken = 0  # requests that came before one of another party, and were admitted later

    def came(self, request: RequestState) -> None:
        self._newest[request.level] = request.arrival_time
        if not any(other.party == request.party for other in self._waiting.values()):
            self._have_turn(request)
        self._waiting[request.request_id] = request

    def check(self, scheduler: Scheduler) -> None:
        """Check after each plan that each request that is admitted now had its turn. They are in order."""
        for request in [r for r in self._waiting.values() if r.request_id not in scheduler.requests]:
            del self._waiting[request.request_id]
        before = dict(self._last)
        last_of: defaultdict[int, dict[str, tuple[float, int]]] = defaultdict(lambda: dict(before))
        for request in [*scheduler.running, *scheduler.waiting.preempted]:  # at once, to pad those before
            if request.request_id in self._waiting:
                self._check(request, last_of[self._length(request)])

    def _check(self, admitted: RequestState, last: dict[str, tuple[float, int]]) -> None:
        """last: the turns before this plan, and those at this length in it."""
        earlier = list(takewhile(lambda other: other is not admitted, self._waiting.values()))
        del self._waiting[admitted.request_id]
        self.admitted.append(admitted.request_id)
        for other in self._waiting.values():
            if self._length(other) == self._length(admitted):
                assert other not in earlier or other.party != admitted.party, "first come, first served within a party"
                may_pass = self._num_limits(other) > self._num_limits(admitted)
                assert may_pass or self._key(other, last) >= self._key(admitted, last), "it was somebody else's turn"
                self.num_overtaken += other in earlier and other.level == admitted.level
                self.num_yielded += other in earlier and other.level > admitted.level
        self._have_turn(admitted)
        last[admitted.party] = self._last[admitted.party]

    def _have_turn(self, request: RequestState) -> None:
        self._last[request.party] = self._newest[request.level], next(self._events)

    def _key(self, request: RequestState, last: dict[str, tuple[float, int]]) -> tuple[float, int]:
        time, number = last[request.party]
        urgency = min(LEVEL_AGEING_SECONDS, request.deadline - request.arrival_time)
        return time + LEVEL_AGEING_SECONDS * request.level + urgency, number

    def _num_limits(self, request: RequestState) -> int:
        return sum(level <= request.level for level in self._share_levels)

    def _length(self, request: RequestState) -> int:
        return request.expected_total_tokens.bit_length() if self._by_length else 0
