"""Decides which clients have metric series of their own. Used by `metrics` only. Pure."""

from collections.abc import Callable
from typing import Final, NamedTuple

from conveyor_gateway.capacity.amounts import Amounts
from conveyor_protocol.usage_rows import find_namespace

MAX_NAMED: Final = 1_000


class NamedClient(NamedTuple):
    """A client's requests of one class for one service, which is `namespace/name`."""

    service: str
    client: str
    request_class: str
    owner: str = ""  # of its key, as `NAMESPACE/OWNER`. After a change of the owner, there is one for each of them


class NamedClients:
    """At most MAX_NAMED named clients. If there are too many, the namespace with most of them loses its smallest one.

    So a tenant with many keys takes no series from others. A namespace never loses one to itself: its keys that come
    and go would make any number of series in Prometheus.

    measure: returns how many requests of a named client were counted. drop: called with one that loses its series.
    """

    def __init__(self, measure: Callable[[NamedClient], float], drop: Callable[[NamedClient], None]) -> None:
        self._measure = measure
        self._drop = drop
        self._by_namespace: dict[str, set[NamedClient]] = {}  # the namespace of `find_namespace`
        self._sizes = Amounts[str]()
        self._by_service: dict[str, set[NamedClient]] = {}
        self._number = 0

    def admit(self, named: NamedClient) -> bool:
        """Admit a named client that has no series. Return whether there is room for it."""
        namespace = find_namespace(named.service, named.client)
        if self._number >= MAX_NAMED:
            largest = self._sizes.find_first()
            assert largest is not None, "there are some, so a namespace has one"
            if self._sizes[largest] <= self._sizes[namespace] + 1:
                return False
            self._remove(min(self._by_namespace[largest], key=self._measure))
        self._by_namespace.setdefault(namespace, set()).add(named)
        self._by_service.setdefault(named.service, set()).add(named)
        self._sizes.add(namespace, 1)
        self._number += 1
        return True

    def remove_service(self, service: str) -> None:
        """Remove the named clients of a deleted service."""
        for named in list(self._by_service.get(service, ())):
            self._remove(named)

    def remove_client(self, client: str) -> None:
        """Remove a client whose name has a namespace: a deleted APIKey."""
        for named in list(self._by_namespace.get(find_namespace("", client), ())):
            if named.client == client:
                self._remove(named)

    def _remove(self, named: NamedClient) -> None:
        namespace = find_namespace(named.service, named.client)
        for index, key in ((self._by_namespace, namespace), (self._by_service, named.service)):
            index[key].remove(named)
            if not index[key]:
                del index[key]
        self._sizes.add(namespace, -1)
        self._number -= 1
        self._drop(named)
