"""The requests that wait, in the order of turns. Kept by `scheduler`; `policy` and `running_batch` read it.

Engine requests of one HTTP request (many inputs, many choices) are one party: parties take turns, round robin, and are
first come, first served among themselves and within. So one choice never waits for all of somebody else's. Who was
preempted has had its turn, and comes back before all. What is asked here costs by what is taken, not by what waits.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count

from conveyor_engine.scheduling.request_state import RequestState


class Bucket:
    """Waiting requests that may be batched with each other: all of them, but where a policy batches by length.

    Iterates in the order of turns: one of each party, then another of each, and so on.
    """

    def __init__(self) -> None:
        self._arrivals: OrderedDict[str, RequestState] = OrderedDict()  # all of them, in order of arrival
        self._parties: OrderedDict[str, OrderedDict[str, RequestState]] = OrderedDict()  # the next in turn first

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[RequestState]:
        queues: Iterable[Iterator[RequestState]] = (iter(party.values()) for party in self._parties.values())
        while queues:
            not_over = []
            for queue in queues:
                for request in queue:
                    yield request
                    not_over.append(queue)
                    break
            queues = not_over

    @property
    def first_arrival_time(self) -> float:
        """Since when somebody waits here; not empty."""
        return next(iter(self._arrivals.values())).arrival_time

    @property
    def next_party(self) -> str:
        """Whose turn it is; not empty."""
        return next(iter(self._parties))

    def has(self, party: str) -> bool:
        """Whether some request of it waits here."""
        return party in self._parties

    def add(self, request: RequestState) -> None:
        """Behind all others of its party, which is behind all others if it is new."""
        self._arrivals[request.request_id] = request
        self._parties.setdefault(request.party, OrderedDict())[request.request_id] = request

    def remove(self, request: RequestState) -> bool:
        """False if it is not here."""
        if self._arrivals.pop(request.request_id, None) is None:
            return False
        del self._parties[request.party][request.request_id]
        if not self._parties[request.party]:
            del self._parties[request.party]
        return True

    def pass_turn(self, party: str) -> None:
        """It is behind all others now, if it is here."""
        if party in self._parties:
            self._parties.move_to_end(party)


class WaitingQueue:
    """Iterates over those that come back, oldest first, and then over those that have not run: each bucket by turns."""

    def __init__(self, bucket_of: Callable[[RequestState], int]) -> None:
        """`bucket_of`: requests of different buckets are never in one batch; there are few buckets."""
        self._bucket_of = bucket_of
        self._buckets: defaultdict[int, Bucket] = defaultdict(Bucket)
        self._last_turns: dict[str, int] = {}  # by party: when it had one, or else came
        self._turns = count()
        self.preempted: OrderedDict[str, RequestState] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self.preempted) + sum(map(len, self._buckets.values()))

    def __iter__(self) -> Iterator[RequestState]:
        return chain(self.preempted.values(), *self._buckets.values())

    @property
    def buckets(self) -> list[Bucket]:
        """Those that are not empty; first the one of the party that has waited longest for a turn."""
        return sorted(filter(len, self._buckets.values()), key=lambda bucket: self._last_turns[bucket.next_party])

    def add(self, request: RequestState) -> None:
        """Behind all others of its party."""
        self._last_turns.setdefault(request.party, next(self._turns))
        self._buckets[self._bucket_of(request)].add(request)

    def put_back(self, request: RequestState) -> None:
        """A preempted request, older than all that were preempted and wait."""
        self.preempted[request.request_id] = request
        self.preempted.move_to_end(request.request_id, last=False)

    def remove(self, request: RequestState) -> bool:
        """False if it does not wait."""
        if self.preempted.pop(request.request_id, None) is not None:
            return True
        if not self._buckets[self._bucket_of(request)].remove(request):
            return False
        if not any(bucket.has(request.party) for bucket in self._buckets.values()):
            del self._last_turns[request.party]
        return True

    def take(self, request: RequestState) -> None:
        """It is admitted. If it has not run before, this was its party's turn, in every bucket."""
        had_its_turn = request.request_id in self.preempted
        self.remove(request)
        if not had_its_turn and request.party in self._last_turns:
            self._last_turns[request.party] = next(self._turns)
            for bucket in self._buckets.values():
                bucket.pass_turn(request.party)
