"""Keeps the last places free for clients with few requests, beside a client that would take all. Used by `dispatcher`.

Nobody takes a place away from a request that runs. So without this, each request of a client with few of them would
wait until one of the other client's long requests ends, even if it is first in the queue.
"""

from collections import Counter, OrderedDict
from typing import Final

RECENT_SECONDS: Final = 30.0  # how long places are kept after a request of a client with few of them
MOST_WITH_MANY: Final = 8  # clients that have many places at the same time; each has at least this part of them
CLIENTS_A_PLACE: Final = 2  # active clients with few places for each one that is kept
BEYOND_PEAK: Final = 1  # places that are kept beyond the most that those clients used at once
MAX_RECENT: Final = 1024  # clients that are remembered


class KeptPlaces:
    """Counts the requests of each client at engines. Each operation costs O(1) on average."""

    def __init__(self) -> None:
        self._num_of_client: Counter[str] = Counter()
        self._num_few: Counter[str] = Counter()  # of these, requests that began while their client had few
        self._total_few = 0
        self._peaks = (0, 0)  # the most that `_total_few` was in the present RECENT_SECONDS, and in those before
        self._peak_ends = 0.0  # the present ones
        self._recent: OrderedDict[str, float] = OrderedDict()  # when clients with few places last got one, in order

    def enter(self, client: str, num_places: int, now: float) -> None:
        """Count a request that gets a place."""
        if not self.has_many(client, num_places):
            self._recent[client] = now
            self._recent.move_to_end(client)
            if len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
            self._num_few[client] += 1
            self._total_few += 1
            self._tick(now)
        self._num_of_client[client] += 1

    def leave(self, client: str) -> None:
        """Count a request that leaves its place."""
        self._num_of_client[client] -= 1
        if client in self._num_few:
            self._total_few -= 1
            self._num_few[client] -= 1
            if not self._num_few[client]:
                del self._num_few[client]
        if not self._num_of_client[client]:
            del self._num_of_client[client]

    def forget(self, client: str) -> None:
        """Keep no place for this client until its next request, unless another one runs."""
        if client not in self._num_of_client:
            self._recent.pop(client, None)

    def has_many(self, client: str, num_places: int) -> bool:
        """Return whether the client has a large part of the places. At most MOST_WITH_MANY clients do.

        num_places: at least the number of requests that run, of all clients.
        """
        count = self._num_of_client.get(client, 0)
        return count > 1 and count * MOST_WITH_MANY >= num_places

    def count(self, client: str, now: float) -> int:
        """Return how many places are kept from a client that has many, for the others; 0 if no other is active.

        Clients that send a request now and then, of which few run at once, need few places, however many clients.
        """
        while self._recent and next(iter(self._recent.values())) + RECENT_SECONDS <= now:
            self._recent.popitem(last=False)
        others = len(self._recent) - (client in self._recent)
        self._tick(now)
        return min(-(-others // CLIENTS_A_PLACE), max(self._peaks) + BEYOND_PEAK)

    def _tick(self, now: float) -> None:
        """Update the peaks."""
        if now >= self._peak_ends:
            is_next = now < self._peak_ends + RECENT_SECONDS
            self._peaks = (0, self._peaks[0] if is_next else 0)
            self._peak_ends = now + RECENT_SECONDS
        self._peaks = (max(self._peaks[0], self._total_few), self._peaks[1])

    def find_end(self, client: str) -> float:
        """Return when the count of places that are kept from this client may next be lower. One is kept."""
        first = next(at for other, at in self._recent.items() if other != client)
        return first + RECENT_SECONDS
