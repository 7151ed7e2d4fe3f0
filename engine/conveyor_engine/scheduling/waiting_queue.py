"""The waiting requests, in the order of `sort_key`. `scheduler` changes them; `policy` and `running_batch` read them.

Lower levels go first, but no request waits forever. A request of a lower level overtakes an earlier request only if it
arrives at most `LEVEL_AGEING_SECONDS` times the difference in levels later. A near deadline adds at most
`LEVEL_AGEING_SECONDS` to this time. Within a level, a request with a near deadline goes first.

All engine requests of one HTTP request (many inputs, many choices) are one party. Parties take turns, and the requests
of a party go in order of arrival. So an HTTP request with one choice never waits for all choices of another one. If a
request does not fit into a share of the batch (`shares`), all requests behind it that this share limits are skipped.
The time of a call depends on the number of requests that it takes, and on the logarithm of the number that wait.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heappop, heappush, merge
from itertools import count
from operator import itemgetter
from typing import NamedTuple

from conveyor_engine.scheduling.ordered import Key, Ordered
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.shares import NO_SHARES, Listing, Shares


class Turn(NamedTuple):
    """The last turn of a party, or its arrival if it has had no turn yet.

    `time`: the latest arrival time, up to this turn, among all requests of the party's level.
    """

    number: int
    time: float


def sort_key(request: RequestState, last_turn: Turn) -> Key:
    """Return the key that orders the queue: the lowest key is next. Two parties always have different keys.

    last_turn: the last turn of the request's party. Parties whose requests have the same `yields_seconds` are served
    round robin. The key does not depend on the current time. A preempted request keeps the key of its first admission.
    """
    return (last_turn.time + request.yields_seconds, last_turn.number)


class Turns:
    """Counts the turns. `last` maps each waiting party to its last turn."""

    def __init__(self) -> None:
        self.last: dict[str, Turn] = {}
        self._number = 0
        self._newest: dict[int, float] = {}  # the latest arrival at each level; there are few levels

    def arrive(self, request: RequestState) -> None:
        """Record an arriving request.

        If no other request of its party waits, the party goes after all parties of its level with the same
        `yields_seconds`.
        """
        self._newest[request.level] = max(request.arrival_time, self._newest.get(request.level, 0.0))
        if request.party not in self.last:
            self.take(request)

    def take(self, request: RequestState) -> None:
        """Give the request's party a turn."""
        self._number += 1
        self.last[request.party] = self.imagine(request, self._number)

    def imagine(self, request: RequestState, number: int) -> Turn:
        """Return the turn with this number that the request's party would have if no request arrived until then."""
        return Turn(number, self._newest[request.level])

    def next_numbers(self) -> Iterator[int]:
        """Return an iterator over the numbers of the next turns."""
        return count(self._number + 1)


class Line:
    """Waiting requests of one bucket that have the same limits, in order."""

    def __init__(self, turns: Turns, num_limits: int) -> None:
        self._turns = turns
        self._num_limits = num_limits
        self._arrivals: OrderedDict[str, RequestState] = OrderedDict()  # all of them, in order of arrival
        self._parties: dict[str, OrderedDict[str, RequestState]] = {}
        self._next = Ordered[str]()  # parties, by the key of each party's first request

    def __len__(self) -> int:
        return len(self._arrivals)

    def entries(self, listing: Listing) -> Iterator[tuple[Key, RequestState]]:
        """Yield keys and requests, in order.

        Each party is assumed to have a turn whenever one of its requests is listed.

        The iteration ends when the listing is closed for these requests, which may happen between two requests.
        """
        parties, numbers = self._next.entries(), self._turns.next_numbers()
        party = next(parties, None)
        later: list[tuple[Key, int, RequestState, Iterator[RequestState]]] = []  # a heap of parties' next requests
        while (party or later) and listing.is_open(self._num_limits):
            if party is None or (later and later[0][0] < party[0]):
                key, _, request, rest = heappop(later)
            else:
                key, rest = party[0], iter(self._parties[party[1]].values())
                request, party = next(rest), next(parties, None)
            yield key, request
            number = next(numbers)
            if (follower := next(rest, None)) is not None:
                turn = self._turns.imagine(follower, number)
                heappush(later, (sort_key(follower, turn), number, follower, rest))

    @property
    def first_arrival_time(self) -> float:
        """Arrival time of the request that has waited longest. The line must not be empty."""
        return next(iter(self._arrivals.values())).arrival_time

    @property
    def first_key(self) -> Key:
        """Key of the next request. The line must not be empty."""
        return self._next.first_key

    def has(self, party: str) -> bool:
        """Return whether a request of this party waits here."""
        return party in self._parties

    def add(self, request: RequestState) -> None:
        """Add the request after all other requests of its party."""
        self._arrivals[request.request_id] = request
        self._parties.setdefault(request.party, OrderedDict())[request.request_id] = request
        self.sort(request.party)

    def remove(self, request: RequestState) -> bool:
        """Remove the request. Returns False if it is not here."""
        if self._arrivals.pop(request.request_id, None) is None:
            return False
        del self._parties[request.party][request.request_id]
        self.sort(request.party)
        return True

    def sort(self, party: str) -> None:
        """Move the party to the position of its first request, if one waits here."""
        if requests := self._parties.get(party):
            self._next.put(party, sort_key(next(iter(requests.values())), self._turns.last[party]))
        elif requests is not None:
            del self._parties[party]
            self._next.remove(party)


class Bucket:
    """Waiting requests for which `Policy.bucket` returns the same number. Without grouping: all waiting requests.

    Iterating yields the requests that fit, in the order of the queue. Each party is assumed to take its turns.
    """

    def __init__(self, turns: Turns, shares: Shares, list_fitting: Callable[[], Listing]) -> None:
        self._shares = shares
        self._list_fitting = list_fitting
        self._lines = [Line(turns, number) for number in range(len(shares.limits) + 1)]

    def __len__(self) -> int:
        return sum(map(len, self._lines))

    def __iter__(self) -> Iterator[RequestState]:
        return self.fitting(self._list_fitting())

    def fitting(self, listing: Listing) -> Iterator[RequestState]:
        """Return the requests that fit in addition to those that the listing has already counted."""
        return _fitting(self.entries(listing), listing)

    def entries(self, listing: Listing) -> list[Iterator[tuple[Key, RequestState]]]:
        """Return the entries of each line that is not empty."""
        return [line.entries(listing) for line in self._lines if len(line)]

    @property
    def first_arrival_time(self) -> float:
        """Arrival time of the request that has waited longest. The bucket must not be empty."""
        return min(line.first_arrival_time for line in self._lines if len(line))

    @property
    def first_key(self) -> Key:
        """Key of the next request. The bucket must not be empty."""
        return min(line.first_key for line in self._lines if len(line))

    def line_of(self, request: RequestState) -> Line:
        """Return the line in which the request waits or would wait."""
        return self._lines[self._shares.count_limits(request.level)]


def _fitting(queues: list[Iterator[tuple[Key, RequestState]]], listing: Listing) -> Iterator[RequestState]:
    entries = queues[0] if len(queues) == 1 else merge(*queues, key=itemgetter(0))
    return (request for _, request in entries if listing.fits(request))


class WaitingQueue:
    """The waiting queue. Iterating yields the requests that fit, in the order of the queue."""

    def __init__(
        self,
        bucket_of: Callable[[RequestState], int],
        shares: Shares = NO_SHARES,
        num_blocks_of: Callable[[RequestState], int] = lambda request: 0,
        takes: Callable[[int], bool] | None = None,
    ) -> None:
        """bucket_of: returns a request's bucket. A batch prefers requests of one bucket. There are few buckets.
        num_blocks_of: returns the number of KV blocks that a request gets when it is admitted. takes: see `Listing`.
        """
        self._bucket_of = bucket_of
        self._turns = Turns()
        self.new_listing = partial(Listing, shares, num_blocks_of, takes)
        self._buckets: defaultdict[int, Bucket] = defaultdict(lambda: Bucket(self._turns, shares, self.new_listing))
        self.preempted = Ordered[RequestState]()

    def __len__(self) -> int:
        return len(self.preempted) + sum(map(len, self._buckets.values()))

    def __iter__(self) -> Iterator[RequestState]:
        listing = self.new_listing()
        lines = [line for bucket in self._buckets.values() for line in bucket.entries(listing)]
        return _fitting([self.preempted.entries(), *lines], listing)

    def in_order(self) -> Iterator[RequestState]:
        """Return the requests in the order of the queue, including those that do not fit."""
        listing = self.new_listing()
        lines = [line for bucket in self._buckets.values() for line in bucket.entries(listing)]
        return (request for _, request in merge(self.preempted.entries(), *lines, key=itemgetter(0)))

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that are not empty, in the order of their first requests."""
        return sorted(filter(len, self._buckets.values()), key=lambda bucket: bucket.first_key)

    def fitting_others(self, bucket: Bucket, listing: Listing) -> Iterator[RequestState]:
        """Return requests of all other buckets that fit in addition to those already listed, in the queue's order."""
        others = (other for other in self._buckets.values() if other is not bucket)
        return _fitting([line for other in others for line in other.entries(listing)], listing)

    def add(self, request: RequestState) -> None:
        """Add the request after all other requests of its party."""
        self._turns.arrive(request)
        self._line_of(request).add(request)

    def add_preempted(self, request: RequestState) -> None:
        """Add the request at the position that it had when it was admitted."""
        assert request.key is not None, "a preempted request has been admitted"
        self.preempted.put(request, request.key)

    def remove(self, request: RequestState) -> bool:
        """Remove the request. Returns False if it does not wait."""
        if request in self.preempted:
            self.preempted.remove(request)
            return True
        if not self._line_of(request).remove(request):
            return False
        if not any(line.has(request.party) for line in self._lines_of_party(request)):
            del self._turns.last[request.party]
        return True

    def pop(self, request: RequestState) -> None:
        """Remove a request that is admitted. If it has not run before, this is its party's turn in all buckets."""
        if request.key is not None:
            self.preempted.remove(request)
            return
        request.key = sort_key(request, self._turns.last[request.party])
        self.remove(request)
        if request.party in self._turns.last:
            self._turns.take(request)
            for line in self._lines_of_party(request):
                line.sort(request.party)

    def _line_of(self, request: RequestState) -> Line:
        return self._buckets[self._bucket_of(request)].line_of(request)

    def _lines_of_party(self, request: RequestState) -> Iterator[Line]:
        """Return the lines in which requests of this party may wait: one in each bucket, because all have one level."""
        return (bucket.line_of(request) for bucket in self._buckets.values())
