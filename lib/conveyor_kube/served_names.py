"""Finds the namespace that holds each served name, and the service that gets requests for it at the gateway's root.

The operator, which creates claims, and the gateway, which routes, use the same rule. `ClaimSink` fills a `NameIndex`
from a watch of ServedNames. The caller adds services from its watch of InferenceServices. Pure except for logging.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime

from conveyor_api.adapters import SEPARATOR
from conveyor_api.names import MAX_SERVED_NAMES, UNSERVED_ANNOTATION
from conveyor_api.served_name import ServedName, may_claim
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json, find_key, keys_within

_Ranked = list[tuple[int, str]]
"""(creation time, namespace or service) pairs, oldest first."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One ServedName. The API server sets the creation time, so nobody can make a claim look older."""

    namespace: str
    object_name: str
    uid: str
    name: str
    created_unix: int
    is_unserved: bool = False
    """Whether no service of the namespace with this name was ever Ready."""


@dataclass(frozen=True, slots=True)
class _Server:
    namespace: str
    name: str
    created_unix: int


class NameIndex:
    """The index of claims and services by served name.

    The namespace with the oldest claim of a name holds the name. It also holds later claims of the name with a colon
    and more text behind it, as names of adapters have. Of the holder's services with a name, the oldest gets the
    requests. Keys of claims and services are `namespace/name`. The cost of a change grows with the number of objects of
    the same name.
    """

    def __init__(self) -> None:
        self.claims: dict[str, Claim] = {}
        self._by_name: defaultdict[str, _Ranked] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._servers: dict[str, _Server] = {}
        self._by_server: defaultdict[str, dict[str, _Ranked]] = defaultdict(dict)

    def put_claim(self, key: str, claim: Claim) -> None:
        """Store a claim. Only the first `MAX_SERVED_NAMES` of a namespace count; the operator creates no more."""
        self.remove_claim(key)
        if self._counts[claim.namespace] < MAX_SERVED_NAMES:
            self.claims[key] = claim
            self._counts[claim.namespace] += 1
            insort(self._by_name[claim.name], (claim.created_unix, claim.namespace))

    def remove_claim(self, key: str) -> Claim | None:
        """Remove a claim and return it; None if there is none."""
        claim = self.claims.pop(key, None)
        if claim is not None:
            self._counts[claim.namespace] -= 1
            if not self._counts[claim.namespace]:
                del self._counts[claim.namespace]
            _remove(self._by_name, claim.name, (claim.created_unix, claim.namespace))
        return claim

    def count_claims(self, namespace: str) -> int:
        return self._counts[namespace]

    def put_service(self, key: str, name: str, created_unix: int) -> None:
        namespace = key.partition("/")[0]
        server = _Server(namespace, name, created_unix)
        if server == self._servers.get(key):
            return
        self.remove_service(key)
        self._servers[key] = server
        insort(self._by_server[name].setdefault(namespace, []), (created_unix, key))

    def remove_service(self, key: str) -> None:
        server = self._servers.pop(key, None)
        if server is not None:
            namespaces = self._by_server[server.name]
            _remove(namespaces, server.namespace, (server.created_unix, key))
            if not namespaces:
                del self._by_server[server.name]

    def name_of(self, key: str) -> str | None:
        """Return the name that this service serves; None if the service is not known."""
        server = self._servers.get(key)
        return server.name if server is not None else None

    def find_holder(self, name: str) -> str | None:
        """Return the namespace that holds `name`; None if none does."""
        oldest = self._find_oldest(name)
        return oldest[1] if oldest is not None else None

    def _find_oldest(self, name: str) -> tuple[int, str] | None:
        """Return the oldest claim of a claimed name, or of what is before any colon in it."""
        ranked = self._by_name.get(name)
        if not ranked:
            return None
        oldest = ranked[0]
        while SEPARATOR in name:
            name = name.rpartition(SEPARATOR)[0]
            if ranked := self._by_name.get(name):
                oldest = min(oldest, ranked[0])
        return oldest

    def find_first(self, namespace: str, name: str) -> str | None:
        """Return the oldest service in that namespace that serves `name`."""
        ranked = self._by_server.get(name, {}).get(namespace)
        return ranked[0][1] if ranked else None

    def find_service(self, name: str) -> str | None:
        """Return the service that gets the requests for `name`."""
        holder = self.find_holder(name)
        return None if holder is None else self.find_first(holder, name)

    def list_longer(self, name: str) -> list[str]:
        """Return the served names that consist of `name`, a colon and more text."""
        return [each for each in self._by_server if each.startswith(f"{name}{SEPARATOR}")]

    def list_applicants(self, name: str) -> list[str]:
        """Return each namespace with a service that serves `name`, the namespace with the oldest such service first."""
        namespaces = self._by_server.get(name, {})
        return sorted(namespaces, key=lambda namespace: namespaces[namespace][0])

    def list_unclaimed(self) -> list[str]:
        """Return the served names without a claim, ordered by the age of their oldest service."""
        names = [name for name in self._by_server if name not in self._by_name]
        return sorted(names, key=lambda name: min(ranked[0] for ranked in self._by_server[name].values()))

    def list_siblings(self, namespace: str, name: str) -> list[str]:
        """Return the services in that namespace that serve `name`."""
        return [key for _, key in self._by_server.get(name, {}).get(namespace, ())]


def _remove(lists: dict[str, _Ranked], name: str, item: tuple[int, str]) -> None:
    ranked = lists[name]
    del ranked[bisect_left(ranked, item)]
    if not ranked:
        del lists[name]


class ClaimSink:
    """A sink of `watch` that stores claims in `index`.

    It calls `on_came` or `on_gone` with the claim after the index has changed, and `on_listed` with the namespace (""
    for all namespaces) after a list.
    """

    def __init__(
        self,
        index: NameIndex,
        on_came: Callable[[Claim], None] = lambda claim: None,
        on_gone: Callable[[Claim], None] = lambda claim: None,
        on_listed: Callable[[str], None] = lambda namespace: None,
    ) -> None:
        self._index = index
        self._on_came = on_came
        self._on_gone = on_gone
        self._on_listed = on_listed
        self.unreadable = Unreadable("servedname")

    def put(self, body: Json) -> str:
        key = find_key(body)
        claim = self.unreadable.parse(key, parse_claim, body)
        if claim is not None and claim != self._index.claims.get(key):
            self._remove(key)
            self._index.put_claim(key, claim)
            self._on_came(claim)
        return key

    def delete(self, body: Json) -> None:
        key = find_key(body)
        self.unreadable.forget(key)
        self._remove(key)

    def keep_only(self, keys: set[str], namespace: str) -> Iterator[None]:
        self.unreadable.forget_others(keys, namespace)
        for key in keys_within(namespace, self._index.claims) - keys:
            self._remove(key)
            yield
        self._on_listed(namespace)

    def _remove(self, key: str) -> None:
        if (claim := self._index.remove_claim(key)) is not None:
            self._on_gone(claim)


def parse_claim(body: Json) -> Claim:
    """Parse a ServedName. Raises InvalidResource, or ValueError for a name that its namespace may not claim."""
    resource = ServedName.parse(body)
    metadata, name = resource.metadata, resource.spec.name
    if not may_claim(metadata.namespace, name):
        raise ValueError(f"{name!r} may be the NAMESPACE/NAME of a service in another namespace")
    created_unix = parse_time_unix(metadata.creation_timestamp or "")
    is_unserved = UNSERVED_ANNOTATION in (body["metadata"].get("annotations") or {})
    return Claim(metadata.namespace, metadata.name, metadata.uid, name, created_unix, is_unserved)


def parse_time_unix(text: str) -> int:
    """Return the Unix time of one of the API server's times. Raises ValueError."""
    return int(datetime.fromisoformat(text).timestamp())
