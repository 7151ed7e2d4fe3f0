"""Limits the requests that this gateway holds, and the bytes of requests and responses.

Created by `server`. Each request has one `Reservation`: `relaying.bodies` reserves bytes for the body, `engines` for a
buffered response. No service may hold more than half of all bytes or three quarters of all requests, so that requests
that wait for one service leave room for the others. No client may hold more than seven eighths of either.

A request may be evicted until its answer starts. A holder is one client's requests for one service. If there is no
room, the gateway evicts a request of one holder: the largest request of the holder's least urgent class. The gateway
chooses the largest holder of the service or client that would exceed its limit. If no limit would be exceeded, it
chooses the largest holder of the service or client that holds most. If the new request belongs to the chosen holder,
the new request is rejected instead, unless the body of the request to evict is still arriving.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Final, Self

from conveyor_gateway.capacity.shares import Shares
from conveyor_gateway.errors import Code, GatewayError, TooManyRequests, Unavailable

MAX_EVICTIONS: Final = 4  # to make room for one request or one piece of a body; more would block the event loop


class Capacity:
    """`max_bytes` and `max_requests` are for all services together.

    Bytes of a request whose service is not known yet count for service "".
    """

    def __init__(self, max_bytes: int, max_requests: int = 1_000_000) -> None:
        self.bytes = Shares["Reservation"](max_bytes, max_bytes // 2, max_bytes - max_bytes // 8)
        self.max_requests_of_service = max_requests - max_requests // 4
        self.requests = Shares["Reservation"](
            max_requests, self.max_requests_of_service, max_requests - max_requests // 8
        )

    @property
    def held_bytes(self) -> int:
        return self.bytes.total


class Reservation:
    """The capacity that one request holds, released at the end of the `with` block."""

    __slots__ = (
        "_capacity",
        "_evict",
        "_is_arriving",
        "client",
        "is_evicted",
        "level",
        "num_requests",
        "service",
        "size_bytes",
    )

    def __init__(self, capacity: Capacity, service: str, client: str = "") -> None:
        self._capacity = capacity
        self._evict: Callable[[], None] | None = None
        self._is_arriving = False
        self.service = service
        self.client = client
        self.level = 0  # level of its class; higher levels are evicted first
        self.size_bytes = 0
        self.num_requests = 0  # 1 once the whole body has arrived
        self.is_evicted = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    @contextlib.contextmanager
    def arriving(self, evict: Callable[[], None]) -> Iterator[None]:
        """Make the request evictable while its body arrives. `evict` is called if the request is evicted."""
        self._is_arriving = True
        self._set_evict(evict)
        try:
            yield
        finally:
            self._is_arriving = False
            self._set_evict(None)

    def reserve(self, size_bytes: int) -> bool:
        """Reserve `size_bytes` more. Return False, and reserve nothing, if there is no room."""
        if self.is_evicted or not self._make_room(self._capacity.bytes, size_bytes):
            return False
        self._change(size_bytes, 0)
        return True

    def shrink(self, size_bytes: int) -> None:
        """Release all but `size_bytes`."""
        self._change(min(0, max(0, size_bytes) - self.size_bytes), 0)

    def hold_request(self, service: str, size_bytes: int, evict: Callable[[], None], level: int = 0) -> None:
        """Count a request of `service` whose body is complete. `evict` is called if the request is evicted.

        A holder's requests with the highest `level` are evicted first.

        Raises Unavailable or TooManyRequests.
        """
        self.level = level
        if (service, size_bytes) != (self.service, self.size_bytes):
            self.shrink(0)
            self.service = service
            if not self.reserve(size_bytes):
                raise build_memory_full()
        if not self._make_room(self._capacity.requests, 1):
            raise self._build_requests_full()
        self._change(0, 1)
        self._set_evict(evict)

    def protect(self) -> None:
        """Protect the request from eviction, because its response starts."""
        self._set_evict(None)

    def _make_room(self, shares: Shares["Reservation"], amount: int) -> bool:
        num_evicted = 0
        while not shares.has_room(self, amount):
            victim = shares.find_victim(self, amount)
            if num_evicted == MAX_EVICTIONS or victim is None or victim is self:
                return False
            if victim.holder == self.holder and not victim._is_arriving:
                return False
            victim._leave()
            num_evicted += 1
        return True

    @property
    def holder(self) -> tuple[str, str]:
        return self.service, self.client

    def _leave(self) -> None:
        """Evict the request."""
        evict, self.is_evicted = self._evict, True
        assert evict is not None, "`find_victim` returns only evictable requests"
        self._release()
        evict()

    def _release(self) -> None:
        self._change(-self.size_bytes, -self.num_requests)
        self._set_evict(None)

    def _change(self, size_bytes: int, num_requests: int) -> None:
        """Add these amounts, which may be negative, to the totals."""
        is_evictable = self._evict is not None
        if size_bytes:
            self._capacity.bytes.add(self, size_bytes, is_evictable)
            self.size_bytes += size_bytes
        if num_requests:
            self._capacity.requests.add(self, num_requests, is_evictable)
            self.num_requests += num_requests

    def _set_evict(self, evict: Callable[[], None] | None) -> None:
        if more := (evict is not None) - (self._evict is not None):
            self._capacity.bytes.add_evictable(self, more * self.size_bytes)
            self._capacity.requests.add_evictable(self, more * self.num_requests)
        self._evict = evict

    def _build_requests_full(self) -> GatewayError:
        if self._capacity.requests.find_victim(self, 1) is None and self._capacity.requests.has_share(self):
            return Unavailable("the gateway is at its limit of requests; retry later", Code.TOO_MANY_CONNECTIONS)
        return build_too_many()


def build_memory_full() -> Unavailable:
    return Unavailable("the gateway's memory for requests is full; retry later", Code.GATEWAY_MEMORY_FULL)


def build_too_many() -> TooManyRequests:
    return TooManyRequests(
        "the gateway has no room for so many requests of this service or this client; send fewer at a time",
        Code.TOO_MANY_REQUESTS,
    )
