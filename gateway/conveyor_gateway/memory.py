"""How many bytes of requests and answers are in memory, in all and for each service.

Made by `server`. One `Holding` per request: `bodies` takes what it reads, `proxy` what it collects of an answer. No
service may have more than half of all: requests that wait for one must not shut out those for the others.
"""

from collections import Counter
from typing import Self

from conveyor_gateway.errors import Unavailable


class Memory:
    """`max_bytes` is for all services together. A request whose service is not known yet counts as of service ""."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_service: Counter[str] = Counter()
        self.held_bytes = 0

    def has_room(self, service: str, size_bytes: int) -> bool:
        return (
            self.held_bytes + size_bytes <= self._max_bytes
            and self._by_service[service] + size_bytes <= self._max_bytes // 2
        )

    def count(self, service: str, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self._by_service[service] += size_bytes
        if not self._by_service[service]:
            del self._by_service[service]


class Holding:
    """The bytes of one request and its answer, given back at the end of its `with`."""

    __slots__ = ("_memory", "_service", "size_bytes")

    def __init__(self, memory: Memory, service: str) -> None:
        self._memory = memory
        self._service = service
        self.size_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(0)

    def take(self, size_bytes: int) -> bool:
        """Whether there was room; if not, nothing was taken."""
        if not self._memory.has_room(self._service, size_bytes):
            return False
        self._memory.count(self._service, size_bytes)
        self.size_bytes += size_bytes
        return True

    def shrink(self, size_bytes: int) -> None:
        """Gives back all but `size_bytes`."""
        self._memory.count(self._service, size_bytes - self.size_bytes)
        self.size_bytes = size_bytes

    def assign(self, service: str, size_bytes: int) -> None:
        """From now on the request is for `service` and takes `size_bytes`. Raises Unavailable."""
        if (service, size_bytes) == (self._service, self.size_bytes):
            return
        self.shrink(0)
        self._service = service
        if not self.take(size_bytes):
            raise build_memory_full()


def build_memory_full() -> Unavailable:
    return Unavailable("the gateway holds as many bytes of requests as it may; try again later", "gateway_memory_full")
