"""The APIKeys, as a sink of `watch`, and the caller for a key that a client has sent.

A key has 256 random bits, so it is found by its hash in a dict: nobody can choose keys whose hashes resemble a stored
one, so the time of the search reveals nothing (docs/adr/0178). Keys that are not found are not remembered.
"""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from conveyor_api.api_key import APIKey, KeyLimits, find_key_namespace, hash_key, parse_time_unix
from conveyor_gateway.caller import Caller, Limits
from conveyor_gateway.watching.key_uses import EXPIRED, KeyLog
from conveyor_gateway.watching.table import Table
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json

# The limit for each namespace: above any real use, but a tenant could create more.
MAX_KEYS: Final = 10_000
_UNKNOWN: Final = "this key is unknown or was revoked"
_EXPIRED: Final = "this key has expired"


class Proof(NamedTuple):
    """The proven caller, or why the proof was rejected. `is_pending`: another attempt may succeed soon."""

    caller: Caller | None
    problem: str = ""
    is_pending: bool = False


@dataclass(frozen=True, slots=True)
class Key:
    """The fields of an APIKey that the gateway uses. `expires_unix`: the time for each of its hashes."""

    proof: Proof
    caller: Caller
    expires_unix: dict[str, float]


class KeyTable(Table[Key]):
    """The APIKeys by `namespace/name`. One that cannot be parsed grants nothing, whatever its last version granted.

    If several APIKeys of a namespace have the same hash, the one with the lowest name counts, at all gateways.
    """

    drops_unreadable = True

    def __init__(self, now_unix: Callable[[], float] = time.time) -> None:
        self._keys: dict[str, Key] = {}
        self._by_hash: dict[str, list[Key]] = {}  # by `NAMESPACE/HASH`, sorted by name
        self._now_unix = now_unix
        self.log = KeyLog(now_unix)
        super().__init__(self._keys, Unreadable("apikey", "its keys are rejected"), "APIKeys", MAX_KEYS)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        """Return whether there is an APIKey `namespace/name`."""
        return key in self._keys

    def find(self, text: str) -> Proof | None:
        """Return the proof for a key; None if the text has not the form of a key."""
        namespace = find_key_namespace(text)
        if namespace is None:
            return None
        sha256 = hash_key(text)
        keys = self._by_hash.get(f"{namespace}/{sha256}")
        if keys is None:
            return Proof(None, _UNKNOWN)
        key, now_unix = keys[0], self._now_unix()
        if now_unix >= key.expires_unix[sha256]:
            self.log.note_rejected(key.caller.name, EXPIRED)
            return Proof(None, _EXPIRED)
        self.log.note_use(key.caller.name, now_unix)
        return key.proof

    def _parse(self, body: Json) -> Key:
        return parse_key(body)

    def _weigh(self, item: Key) -> int:
        return 1

    def _keep(self, key: str, item: Key) -> None:
        self._forget(key)
        self._keys[key] = item
        for sha256 in item.expires_unix:
            insort(self._by_hash.setdefault(f"{item.caller.namespace}/{sha256}", []), item, key=_find_name)

    def _drop(self, key: str) -> None:
        self._forget(key)
        self.log.forget(key)
        self._notify(key)

    def _forget(self, key: str) -> None:
        dropped = self._keys.pop(key, None)
        if dropped is None:
            return
        for sha256 in dropped.expires_unix:
            entry = f"{dropped.caller.namespace}/{sha256}"
            keys = self._by_hash[entry]
            del keys[bisect_left(keys, dropped.caller.name, key=_find_name)]
            if not keys:
                del self._by_hash[entry]


def _find_name(key: Key) -> str:
    return key.caller.name


def parse_key(body: Json) -> Key:
    """Parse an APIKey. Raises InvalidResource."""
    resource = APIKey.parse(body)
    namespace, spec = resource.metadata.namespace, resource.spec
    caller = Caller(
        name=f"{namespace}/{resource.metadata.name}",
        namespace=namespace,
        owner=spec.owner or "",
        max_class=spec.max_class or "",
        limits=_parse_limits(spec.limits),
        services=frozenset(each if "/" in each else f"{namespace}/{each}" for each in spec.services),
    )
    expires_unix, last = dict[str, float](), _parse_expiry(spec.expires)
    for each in spec.hashes:  # one may occur twice
        expires_unix[each.sha256] = min(last, _parse_expiry(each.expires), expires_unix.get(each.sha256, math.inf))
    return Key(Proof(caller), caller, expires_unix)


def _parse_expiry(text: str | None) -> float:
    return math.inf if text is None else parse_time_unix(text)


def _parse_limits(limits: KeyLimits | None) -> Limits | None:
    if limits is None or limits == KeyLimits():
        return None
    return Limits(
        limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.concurrent_requests
    )
