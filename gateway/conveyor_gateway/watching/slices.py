"""The engines of each service that take new requests, as the EndpointSlices of the cluster tell them.

Used by `catalog`. Knows the shape of an EndpointSlice, not how it is fetched.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from conveyor_api.names import ENGINE_PORT_NAME, INFERENCE_SERVICE_LABEL
from conveyor_gateway.watching.namespace_limits import NamespaceLimit
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json, find_key, keys_within

MAX_ENGINES: Final = 5_000  # of one namespace; more than anybody runs, but a tenant may write far more
_NO_ENGINES: Final[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """One EndpointSlice: the engines of `service` in it that take new requests, as `(pod, host:port)`."""

    service: str
    engines: tuple[tuple[str, str], ...]


def parse_slice(body: Mapping[str, Any]) -> Slice:
    """Ready endpoints only: one that terminates, though it may still serve, gets no new request.

    The pod stands first so that one with two addresses (dual stack has a slice per family) is one engine.
    """
    metadata = body["metadata"]
    service = f"{metadata['namespace']}/{metadata['labels'][INFERENCE_SERVICE_LABEL]}"
    named = [port.get("port") for port in body.get("ports") or [] if port.get("name") == ENGINE_PORT_NAME]
    ports = [port for port in named if port]  # a port may come without a number
    if not ports or body["addressType"] == "FQDN":
        return Slice(service, ())
    template = "[{}]:{}" if body["addressType"] == "IPv6" else "{}:{}"
    engines = []
    for endpoint in body.get("endpoints") or []:
        conditions = endpoint.get("conditions") or {}
        if conditions.get("ready") is not False and not conditions.get("terminating"):
            address = template.format(endpoint["addresses"][0], ports[0])
            pod = (endpoint.get("targetRef") or {}).get("uid") or address
            engines.append((pod, address))
    return Slice(service, tuple(engines))


class SliceTable:
    """The EndpointSlices of engines, as a sink of `watch`."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
        self._limit = NamespaceLimit("engines", MAX_ENGINES)
        self.unreadable = Unreadable("slice")
        self._slices: dict[str, Slice] = {}
        self._by_service: dict[str, set[str]] = {}

    def engines(self, service: str) -> tuple[str, ...]:
        names = self._by_service.get(service)
        if not names:
            return _NO_ENGINES
        by_pod: dict[str, str] = {}
        for name in sorted(names):
            for pod, address in self._slices[name].engines:
                by_pod.setdefault(pod, address)
        return tuple(by_pod.values())

    def put(self, body: Json) -> str:
        """As `ServiceTable.put`."""
        key = find_key(body)
        piece = self.unreadable.parse(key, self._parse, body)
        known = self._slices.get(key)
        if piece is not None and known != piece:
            if known is not None and known.service != piece.service:  # its label was edited
                self._forget(key)
            self._slices[key] = piece
            self._by_service.setdefault(piece.service, set()).add(key)
            self._on_change(piece.service)
        return key

    def delete(self, body: Json) -> None:
        key = find_key(body)
        self.unreadable.forget(key)
        self._remove(key)

    def keep_only(self, keys: set[str], namespace: str) -> None:
        """As a sink of `watch`."""
        self.unreadable.forget_others(keys, namespace)
        for key in keys_within(namespace, self._slices) - keys:
            self._remove(key)

    def _parse(self, body: Json) -> Slice:
        key, piece = find_key(body), parse_slice(body)
        self._limit.change(key, _weigh(self._slices.get(key)), _weigh(piece))
        return piece

    def _remove(self, key: str) -> None:
        self._limit.change(key, _weigh(self._slices.get(key)), 0)
        self._forget(key)

    def _forget(self, key: str) -> None:
        if (piece := self._slices.pop(key, None)) is not None:
            names = self._by_service[piece.service]
            names.discard(key)
            if not names:
                del self._by_service[piece.service]
            self._on_change(piece.service)


def _weigh(piece: Slice | None) -> int:
    """A slice without engines takes memory too."""
    return 0 if piece is None else max(1, len(piece.engines))
