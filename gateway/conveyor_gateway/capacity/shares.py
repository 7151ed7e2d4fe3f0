"""Counts how much of one resource, such as bytes or requests, each service and client holds.

Used by `reservations` only. The request to evict is found without a scan: an operation costs O(log holders) on average.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable
from typing import Final, Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_CHANGES: Final = 256  # limit of requests with unapplied changes, because an eviction first applies all of them
_NOTHING: Final = (0, 0)


class Member(Hashable, Protocol):
    """A request, with its service, its client and the level of its class."""

    service: str
    client: str
    level: int


M = TypeVar("M", bound=Member)


class Amounts(Generic[K]):
    """Amounts by key. Finds the key with the largest amount in the highest level; of equals, the one changed last."""

    def __init__(self) -> None:
        self._entries: dict[K, tuple[int, int, int, K]] = {}
        self._heap: list[tuple[int, int, int, K]] = []  # may have stale entries; `find_largest` and `add` drop them
        self._changes = 0

    def __getitem__(self, key: K) -> int:
        return -self._entries.get(key, _NOTHING)[1]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: K, amount: int, level: int = 0) -> None:
        """Add `amount`, which may be negative. Drop the key if its total becomes 0. `level` is fixed for a key."""
        entries, heap = self._entries, self._heap
        total = amount - entries.get(key, _NOTHING)[1]
        if not total:
            entries.pop(key, None)
            return
        self._changes += 1
        entry = entries[key] = (-level, -total, -self._changes, key)
        heapq.heappush(heap, entry)
        if len(heap) > 2 * len(entries) + 16:
            heap[:] = entries.values()
            heapq.heapify(heap)

    def find_largest(self) -> K | None:
        while self._heap and self._entries.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1] if self._heap else None


class Shares(Generic[M]):
    """The amounts of all requests. `most` limits their sum; the other limits are for one service and one client."""

    def __init__(self, most: int, most_of_service: int, most_of_client: int) -> None:
        self._most: Final = most
        self._most_of_service: Final = most_of_service
        self._most_of_client: Final = most_of_client
        self._services, self._clients = dict[str, int](), dict[str, int]()
        self._evictable = _Evictable[M]()
        self.total = 0

    def add(self, member: M, amount: int, is_evictable: bool) -> None:
        """Add `amount`, which may be negative, to what `member` holds."""
        self.total += amount
        _add(self._services, member.service, amount)
        _add(self._clients, member.client, amount)
        if is_evictable:
            self.add_evictable(member, amount)

    def add_evictable(self, member: M, amount: int) -> None:
        """Add `amount`, which may be negative, to the evictable part of what `member` holds."""
        self._evictable.add(member, amount)

    def has_room(self, member: M, amount: int) -> bool:
        full = self._is_service_full(member, amount) or self._is_client_full(member, amount)
        return not full and self.total + amount <= self._most

    def has_share(self, member: M) -> bool:
        """Return whether the service and the client of `member` are both below their own limits."""
        return not (self._is_service_full(member, 1) or self._is_client_full(member, 1))

    def find_victim(self, member: M, amount: int) -> M | None:
        """Return the request to evict for `member`: the largest request in one holder's least urgent level.

        The holder is the largest one within the service or client that `member` would bring above its own limit, or
        otherwise within the service or client that holds most. Returns None if no request can be evicted.
        """
        return self._evictable.find_largest(
            member.service if self._is_service_full(member, amount) else None,
            member.client if self._is_client_full(member, amount) else None,
        )

    def _is_service_full(self, member: M, amount: int) -> bool:
        return self._services.get(member.service, 0) + amount > self._most_of_service

    def _is_client_full(self, member: M, amount: int) -> bool:
        return self._clients.get(member.client, 0) + amount > self._most_of_client


class _Evictable(Generic[M]):
    """The members that may be evicted, by holder. A holder is one client's requests for one service.

    Most requests end before the gateway is full. So changes are collected, and a request that comes and goes meanwhile
    leaves nothing to apply.
    """

    def __init__(self) -> None:
        # Not applied yet, by member and by what it was at the time, because its service and level may change. In order.
        self._changes = dict[tuple[M, str, str, int], int]()
        self._services, self._clients = Amounts[str](), Amounts[str]()
        self._clients_of = defaultdict[str, Amounts[str]](Amounts)
        self._services_of = defaultdict[str, Amounts[str]](Amounts)
        self._members: defaultdict[tuple[str, str], Amounts[M]] = defaultdict(Amounts)

    def add(self, member: M, amount: int) -> None:
        _add(self._changes, (member, member.service, member.client, member.level), amount)
        if len(self._changes) > MAX_CHANGES:
            self._apply()

    def _apply(self) -> None:
        for (member, service, client, level), amount in self._changes.items():
            self._services.add(service, amount)
            self._clients.add(client, amount)
            _add_to_group(self._clients_of, service, client, amount)
            _add_to_group(self._services_of, client, service, amount)
            _add_to_group(self._members, (service, client), member, amount, level)
        self._changes.clear()

    def find_largest(self, service: str | None, client: str | None) -> M | None:
        """Return the largest member in the highest level of the holder from `_find_holder`; None without one."""
        self._apply()
        members = self._members.get(self._find_holder(service, client))
        return None if members is None else members.find_largest()

    def _find_holder(self, service: str | None, client: str | None) -> tuple[str, str]:
        """Return the service and client of the largest holder of this service or client; empty names without one.

        If both are None, it is the largest holder within the service or the client that holds most.
        """
        if service is None and client is None:
            service, client = self._services.find_largest() or "", self._clients.find_largest() or ""
            if self._clients[client] >= self._services[service]:
                return self._find_holder(None, client)
            return self._find_holder(service, None)
        if service is None:
            services = self._services_of.get(client or "")
            service = services.find_largest() if services is not None else None
        elif client is None:
            clients = self._clients_of.get(service)
            client = clients.find_largest() if clients is not None else None
        return service or "", client or ""


G = TypeVar("G", bound=Hashable)


def _add(totals: dict[K, int], key: K, amount: int) -> None:
    """Add `amount`, which may be negative. The key becomes the last one, and is dropped if its total becomes 0."""
    if total := totals.pop(key, 0) + amount:
        totals[key] = total


def _add_to_group(groups: defaultdict[G, Amounts[K]], group: G, key: K, amount: int, level: int = 0) -> None:
    amounts = groups[group]
    amounts.add(key, amount, level)
    if not amounts:
        del groups[group]
