"""How much of one resource, such as bytes or requests, each owner has. Used by `ledger` only.

The owners form a tree: namespaces, their services, and the clients of each service. If there is no room, the largest
namespace loses, in it the largest service, and of this service the largest client. So every namespace gets its part
(max-min fairness), whatever the others do: the smaller ones get what they ask for, and the larger ones share the rest
equally. The same holds for the services of a namespace and for the clients of a service.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from conveyor_gateway.capacity.amounts import Amounts

MAX_CHANGES: Final = 256  # limit of unapplied changes, because a search for a victim first applies all of them


class Owner(NamedTuple):
    """For whom something is held. `service`: `namespace/name`. Namespace and service are "" while they are unknown."""

    namespace: str
    service: str
    client: str


class Member(Hashable, Protocol):
    """Something that is held. The owner's member with the highest rank is evicted first, of equals the youngest."""

    owner: Owner
    rank: int
    number: int


M = TypeVar("M", bound=Member)


class Parts(Generic[M]):
    """The amounts of all members. `most` limits their sum, and seven eighths of it the sum of one namespace.

    So small amounts of other namespaces find room without an eviction.
    """

    def __init__(self, most: int) -> None:
        self.most: Final = most
        self.most_of_namespace: Final = most - most // 8
        self.total = 0
        self.namespaces = dict[str, int]()
        # Not applied yet, by member and by what it was at that time, in order. Most requests end before the gateway is
        # full, and a member that comes and goes meanwhile leaves nothing to apply.
        self._changes = dict[tuple[M, Owner, int], int]()
        self._groups = defaultdict[tuple[str, ...], Amounts[str]](Amounts)  # children by the path of their parent
        self._members = defaultdict[Owner, Amounts[M]](Amounts)

    def add(self, member: M, amount: int) -> None:
        """Add `amount`, which may be negative, to what `member` has. Remove it before owner or rank change."""
        namespace = member.owner.namespace
        self.total += amount
        if of_namespace := self.namespaces.get(namespace, 0) + amount:
            self.namespaces[namespace] = of_namespace
        else:
            self.namespaces.pop(namespace, None)
        changes, key = self._changes, (member, member.owner, member.rank)
        if changed := changes.pop(key, 0) + amount:
            changes[key] = changed
            if len(changes) > MAX_CHANGES:
                self._apply()

    def has_room(self, namespace: str, amount: int) -> bool:
        is_inside = self.namespaces.get(namespace, 0) + amount <= self.most_of_namespace
        return is_inside and self.total + amount <= self.most

    def find_victim(self, owner: Owner, amount: int) -> M | None:
        """Return the member to evict for `amount` more of `owner`. None: there is none.

        At each level, the largest group loses if it has more than the owner's own group would then have. If the
        owner's own group is the largest at every level, the victim is one of the owner's own members.
        """
        self._apply()
        first_level = 1 if self.total + amount <= self.most else 0  # 1: only the namespace's own limit is reached
        for level in range(first_level, len(owner)):
            group, own = self._groups.get(owner[:level]), owner[level]
            largest = group.find_first() if group is not None else None
            if group is not None and largest is not None and group[largest] > group[own] + amount:
                return self._find_in((*owner[:level], largest))
        return self._members[owner].find_first() if owner in self._members else None

    def _find_in(self, path: tuple[str, ...]) -> M | None:
        """Return the victim within the namespace, service or client at `path`."""
        while len(path) < len(Owner._fields):
            largest = self._groups[path].find_first()
            assert largest is not None, "a group without members is dropped"
            path = (*path, largest)
        return self._members[Owner(*path)].find_first()

    def _apply(self) -> None:
        for (member, owner, rank), amount in self._changes.items():
            for level in range(len(owner)):
                self._add_to_group(owner[:level], owner[level], amount)
            members = self._members[owner]
            members.add(member, amount, rank, member.number)
            if not members:
                del self._members[owner]
        self._changes.clear()

    def _add_to_group(self, path: tuple[str, ...], key: str, amount: int) -> None:
        group = self._groups[path]
        group.add(key, amount)
        if not group:
            del self._groups[path]
