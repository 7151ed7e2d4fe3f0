"""How many bytes of requests and answers are in memory: in all, for each service and for each client address.

Made by `server`. One `Holding` per request: `bodies` takes what it reads, `engines` what it collects of an answer. No
service may have more than half of all: requests that wait for one must not shut out those for the others. No client may
have the last eighth. Bodies that are still arriving give way: when there is no room, the client that holds most in them
loses the one that it began first.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self

from conveyor_gateway.errors import Code, Unavailable


class Memory:
    """`max_bytes` is for all services together. A request whose service is not known yet counts as of service ""."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._by_service: Counter[str] = Counter()
        self._by_client: Counter[str] = Counter()
        self._arriving: dict[Holding, Callable[[], None]] = {}  # the oldest first
        self.held_bytes = 0

    def make_room(self, asking: "Holding", size_bytes: int) -> bool:
        """Whether there is room; takes it from bodies that are still arriving if that is needed."""
        while True:
            service_full = self._by_service[asking.service] + size_bytes > self._max_bytes // 2
            client_full = self._by_client[asking.client] + size_bytes > self._max_bytes - self._max_bytes // 8
            if not (service_full or client_full or self.held_bytes + size_bytes > self._max_bytes):
                return True
            victim = self._find_victim(asking.service if service_full else None, asking.client if client_full else None)
            if victim is None or victim is asking:
                return False
            victim.shrink(0)
            victim.is_evicted = True
            self._arriving.pop(victim)()

    def _find_victim(self, service: str | None, client: str | None) -> "Holding | None":
        """None: of any service, of any client."""
        candidates = [
            each
            for each in self._arriving
            if each.size_bytes and service in (None, each.service) and client in (None, each.client)
        ]
        held: Counter[str] = Counter()
        for each in candidates:
            held[each.client] += each.size_bytes
        worst = max(held, key=held.__getitem__, default=None)
        return next((each for each in candidates if each.client == worst), None)

    def count(self, holding: "Holding", size_bytes: int) -> None:
        self.held_bytes += size_bytes
        for counter, key in ((self._by_service, holding.service), (self._by_client, holding.client)):
            counter[key] += size_bytes
            if not counter[key]:
                del counter[key]

    @contextlib.contextmanager
    def arriving(self, holding: "Holding", stop: Callable[[], None]) -> Iterator[None]:
        """While the body of `holding` arrives; `stop` is called when it has to give way."""
        self._arriving[holding] = stop
        try:
            yield
        finally:
            self._arriving.pop(holding, None)


class Holding:
    """The bytes of one request and its answer, given back at the end of its `with`."""

    __slots__ = ("_memory", "client", "is_evicted", "service", "size_bytes")

    def __init__(self, memory: Memory, service: str, client: str = "") -> None:
        self._memory = memory
        self.service = service
        self.client = client
        self.size_bytes = 0
        self.is_evicted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shrink(0)

    def arriving(self, stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
        """See `Memory.arriving`."""
        return self._memory.arriving(self, stop)

    def take(self, size_bytes: int) -> bool:
        """Whether there was room; if not, nothing was taken."""
        if self.is_evicted or not self._memory.make_room(self, size_bytes):
            return False
        self._memory.count(self, size_bytes)
        self.size_bytes += size_bytes
        return True

    def shrink(self, size_bytes: int) -> None:
        """Gives back all but `size_bytes`."""
        self._memory.count(self, size_bytes - self.size_bytes)
        self.size_bytes = size_bytes

    def assign(self, service: str, size_bytes: int) -> None:
        """From now on the request is for `service` and takes `size_bytes`. Raises Unavailable."""
        if (service, size_bytes) == (self.service, self.size_bytes):
            return
        self.shrink(0)
        self.service = service
        if not self.take(size_bytes):
            raise build_memory_full()


def build_memory_full() -> Unavailable:
    return Unavailable(
        "the gateway holds as many bytes of requests as it may; try again later", Code.GATEWAY_MEMORY_FULL
    )
