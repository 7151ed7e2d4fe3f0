"""The engines of each service that accept new requests, read from the EndpointSlices of the cluster.

Used by `catalog`. This module knows the shape of an EndpointSlice, not how it is fetched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conveyor_api.names import ENGINE_PORT_NAME, INFERENCE_SERVICE_LABEL
from conveyor_gateway.watching.table import Table
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json

MAX_ENGINES: Final = 5_000  # for each namespace; above any real use, but a tenant could write more


@dataclass(frozen=True, slots=True)
class Slice:
    """One EndpointSlice: the engines of `service` in it that accept new requests, as `(pod, host:port)`."""

    service: str
    engines: tuple[tuple[str, str], ...]


def parse_slice(body: Mapping[str, Any]) -> Slice:
    """Parse an EndpointSlice. Only ready endpoints count. A terminating one may still serve, but gets no new requests.

    Engines are identified by pod, so that a pod with two addresses is one engine (dual stack has a slice for each
    address family).
    """
    metadata = body["metadata"]
    service = f"{metadata['namespace']}/{metadata['labels'][INFERENCE_SERVICE_LABEL]}"
    named = [port.get("port") for port in body.get("ports") or [] if port.get("name") == ENGINE_PORT_NAME]
    ports = [port for port in named if port]  # `port` may be null
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


class SliceTable(Table[Slice]):
    """The EndpointSlices of engines, as a sink of `watch`."""

    def __init__(self) -> None:
        self._slices: dict[str, Slice] = {}
        super().__init__(self._slices, Unreadable("slice"), "engines", MAX_ENGINES)
        self._by_service: dict[str, set[str]] = {}
        self._engines: dict[str, dict[str, str]] = {}  # what `engines` returned since the service's last change

    def engines(self, service: str) -> Mapping[str, str]:
        """Return the address of each engine by its pod's uid, or by the address if the slice names no pod."""
        by_pod = self._engines.get(service)
        if by_pod is None and service in self._by_service:
            by_pod = self._engines[service] = {}
            for name in sorted(self._by_service[service]):
                for pod, address in self._slices[name].engines:
                    by_pod.setdefault(pod, address)
        return by_pod or {}

    def _parse(self, body: Json) -> Slice:
        return parse_slice(body)

    def _weigh(self, item: Slice) -> int:
        """Return the number of engines, at least 1, because a slice without engines needs memory too."""
        return max(1, len(item.engines))

    def _keep(self, key: str, item: Slice) -> None:
        known = self._slices.get(key)
        if known is not None and known.service != item.service:  # its label was edited
            self._drop(key)
        self._slices[key] = item
        self._by_service.setdefault(item.service, set()).add(key)
        self._engines.pop(item.service, None)
        self._notify(item.service)

    def _drop(self, key: str) -> None:
        piece = self._slices.pop(key)
        self._engines.pop(piece.service, None)
        names = self._by_service[piece.service]
        names.discard(key)
        if not names:
            del self._by_service[piece.service]
        self._notify(piece.service)
