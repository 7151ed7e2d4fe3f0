"""Keeps the last places free for clients with few requests, beside a client that would take all. Used by `dispatcher`.

Nobody takes a place away from a request that runs. So without this, each request of a client with few of them would
wait until one of the other client's long requests ends, even if it is first in the queue.
"""

from collections import Counter
from typing import Final

RECENT_SECONDS: Final = 30.0  # how long places are kept after a request of a client with few of them
MOST_WITH_MANY: Final = 8  # clients that have many places at the same time; each has at least this part of them


class KeptPlaces:
    """Counts the requests of each client at engines. Each operation costs O(1)."""

    def __init__(self) -> None:
        self._num_of_client: Counter[str] = Counter()
        self._newest = ""  # the client with few places that was the last one to get one
        self._newest_at = float("-inf")
        self._other_at = float("-inf")  # when another client with few places last got one

    def enter(self, client: str, num_places: int, now: float) -> None:
        """Count a request that gets a place."""
        if not self.has_many(client, num_places):
            if client != self._newest:
                self._newest, self._other_at = client, self._newest_at
            self._newest_at = now
        self._num_of_client[client] += 1

    def leave(self, client: str) -> None:
        """Count a request that leaves its place."""
        self._num_of_client[client] -= 1
        if not self._num_of_client[client]:
            del self._num_of_client[client]

    def has_many(self, client: str, num_places: int) -> bool:
        """Return whether the client has a large part of the places. At most MOST_WITH_MANY clients do.

        num_places: at least the number of requests that run, of all clients.
        """
        count = self._num_of_client.get(client, 0)
        return count > 1 and count * MOST_WITH_MANY >= num_places

    def find_end(self, client: str) -> float:
        """Return until when places are kept from this client, if it has many."""
        others_at = self._other_at if client == self._newest else self._newest_at
        return others_at + RECENT_SECONDS
