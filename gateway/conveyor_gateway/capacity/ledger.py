"""The ledger of this gateway: everything that it holds for somebody, by owner.

Created by `server`. A *hold* is a request that a client has sent (for an engine or for a page), with the bytes of its
body and its answer; or a query that the gateway sends to an engine itself. Whoever reads a body or waits for an engine
needs a hold: the functions of `engines` and `relaying.bodies` take one as an argument.

If there is no room, the ledger evicts a hold of the largest owner (`parts`), or refuses the one that asks if it belongs
to the largest owner itself. Every hold may be evicted at any time, also a stream that has begun. Of one client's holds
for one service, bodies that are still arriving go first, then requests without an answer, the least urgent class first,
and then streams that have begun. Of equals, the youngest goes first.
"""

import itertools
from collections.abc import Callable
from typing import Final, Self

from conveyor_gateway.capacity.parts import Owner, Parts
from conveyor_gateway.capacity.turns import Turns
from conveyor_gateway.errors import Code, GatewayError

MAX_EVICTIONS: Final = 16  # to make room for one request or one piece of a body; more would block the event loop
_ARRIVING: Final = 1 << 40  # above the level of every class
_BEGUN: Final = -1 << 40
_NUMBERS: Final = itertools.count(1)

Evict = Callable[[GatewayError], None]


class Ledger:
    """`max_bytes` and `max_requests` are for all owners together."""

    def __init__(self, max_bytes: int, max_requests: int = 1_000_000) -> None:
        self.bytes = Parts["Hold"](max_bytes)
        self.requests = Parts["Hold"](max_requests)
        self.turns = Turns()

    def hold(self, owner: Owner, evict: Evict) -> "Hold":
        """Hold one request for `owner` until the end of the `with` block. Raises GatewayError.

        evict: called with the reason if the hold is evicted. It must end what the hold is for.
        """
        hold = Hold(self, owner, evict)
        if not hold.make_room(self.requests, 1):
            raise build_too_many()
        hold.change(0, 1)
        return hold

    def hold_bytes(self, owner: Owner) -> "Hold":
        """Return a hold for bytes only, for pages that the gateway's own callers request (the admin port).

        The admin port has its own limit of connections. If such a hold is evicted, it only gets no more bytes.
        """
        return Hold(self, owner, lambda error: None)


class Hold:
    """What is held for one request or query. Released at the end of the `with` block, or when it is evicted."""

    __slots__ = ("_evict", "_ledger", "evicted_by", "num_requests", "number", "owner", "rank", "size_bytes")

    def __init__(self, ledger: Ledger, owner: Owner, evict: Evict) -> None:
        self._ledger = ledger
        self._evict = evict
        self.owner = owner
        self.rank = 0  # of one owner's holds, the highest rank is evicted first
        self.number = next(_NUMBERS)  # the youngest has the highest one
        self.size_bytes = 0
        self.num_requests = 0
        self.evicted_by: GatewayError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.change(-self.size_bytes, -self.num_requests)

    async def wait_turn(self) -> None:
        """Return in a turn of the event loop in which the owner may do work."""
        await self._ledger.turns.wait(self.owner.namespace or self.owner.client)

    def check(self) -> None:
        """Check that this is the hold of a request or query, before it waits for an engine."""
        assert self.num_requests or self.evicted_by is not None, "whoever waits for an engine needs a hold"

    def reserve(self, size_bytes: int) -> bool:
        """Reserve `size_bytes` more. Return False, and reserve nothing, if there is no room."""
        if self.evicted_by is not None or not self.make_room(self._ledger.bytes, size_bytes):
            return False
        self.change(size_bytes, 0)
        return True

    def shrink(self, size_bytes: int) -> None:
        """Release all bytes but `size_bytes`."""
        self.change(min(0, max(0, size_bytes) - self.size_bytes), 0)

    def note_arriving(self) -> None:
        """Note that the body is still arriving."""
        self._move(self.owner, _ARRIVING)

    def note_arrived(self, owner: Owner, size_bytes: int, level: int = 0) -> None:
        """Note that the whole body has arrived, so its owner and the level of its class are known.

        Raises GatewayError, or the error with which the request was evicted.
        """
        if self.evicted_by is not None:
            raise self.evicted_by
        self._move(owner, level)
        if size_bytes > self.size_bytes and not self.reserve(size_bytes - self.size_bytes):
            raise build_memory_full()
        self.shrink(size_bytes)

    def note_begun(self) -> None:
        """Note that the answer begins."""
        self._move(self.owner, _BEGUN)

    def _move(self, owner: Owner, rank: int) -> None:
        if (owner, rank) == (self.owner, self.rank):
            return
        size_bytes, num_requests = self.size_bytes, self.num_requests
        self.change(-size_bytes, -num_requests)
        self.owner, self.rank = owner, rank
        self.change(size_bytes, num_requests)

    def make_room(self, parts: Parts["Hold"], amount: int) -> bool:
        """Evict others until there is room for `amount` more. Return False if this hold's owner is the largest."""
        num_evicted = 0
        while not parts.has_room(self.owner.namespace, amount):
            victim = parts.find_victim(self.owner, amount)
            if num_evicted == MAX_EVICTIONS or victim is None or victim is self:
                return False
            if victim.owner == self.owner and victim.rank != _ARRIVING:
                return False
            victim.leave(build_too_many() if parts is self._ledger.requests else build_memory_full())
            num_evicted += 1
        return True

    def leave(self, error: GatewayError) -> None:
        """Evict the hold."""
        self.evicted_by = build_evicted() if self.rank == _BEGUN else error
        self.change(-self.size_bytes, -self.num_requests)
        self._evict(self.evicted_by)

    def change(self, size_bytes: int, num_requests: int) -> None:
        """Add these amounts, which may be negative. The caller has made room."""
        if size_bytes:
            self._ledger.bytes.add(self, size_bytes)
            self.size_bytes += size_bytes
        if num_requests:
            self._ledger.requests.add(self, num_requests)
            self.num_requests += num_requests


def build_memory_full() -> GatewayError:
    return GatewayError("the gateway's memory for requests is full; retry later", Code.GATEWAY_MEMORY_FULL)


def build_too_many() -> GatewayError:
    return GatewayError(
        "the gateway has no room for so many requests of this namespace, service or client; send fewer at a time",
        Code.TOO_MANY_REQUESTS,
    )


def build_evicted() -> GatewayError:
    return GatewayError(
        "the gateway is full, and this namespace, service or client has more than its part; retry with fewer at a time",
        Code.EVICTED,
    )
