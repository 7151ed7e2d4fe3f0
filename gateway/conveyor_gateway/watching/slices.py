"""The engines of each service that accept new requests, read from the EndpointSlices of the cluster.

Used by `catalog`. This module knows the shape of an EndpointSlice, not how it is fetched. `admission.doubtful` asks the
engines of a service without a ready one whether they answer, and reports those that do with `trust`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from conveyor_api.names import ENGINE_PORT_NAME, INFERENCE_SERVICE_LABEL
from conveyor_gateway.watching.table import Table
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json

MAX_ENGINES: Final = 5_000  # for each namespace; above any real use, but a tenant could write more


class Doubtful(NamedTuple):
    """An engine that Kubernetes calls not ready: it starts, fails, or its node has stopped reporting."""

    pod_name: str
    address: str  # host:port


@dataclass(frozen=True, slots=True)
class Slice:
    """One EndpointSlice of `service`: its ready engines as `(pod, host:port)`, and the doubtful ones by pod."""

    service: str
    engines: tuple[tuple[str, str], ...]
    doubtful: tuple[tuple[str, Doubtful], ...] = ()


def parse_slice(body: Mapping[str, Any]) -> Slice:
    """Parse an EndpointSlice. A terminating endpoint may still serve, but gets no new requests.

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
    engines, doubtful = [], []
    for endpoint in body.get("endpoints") or []:
        conditions, target = endpoint.get("conditions") or {}, endpoint.get("targetRef") or {}
        if conditions.get("terminating"):
            continue
        address = template.format(endpoint["addresses"][0], ports[0])
        if conditions.get("ready") is not False:
            engines.append((target.get("uid") or address, address))
        elif target.get("uid") and target.get("name"):
            doubtful.append((target["uid"], Doubtful(target["name"], address)))
    return Slice(service, tuple(engines), tuple(doubtful))


class SliceTable(Table[Slice]):
    """The EndpointSlices of engines, as a sink of `watch`."""

    def __init__(self) -> None:
        self._slices: dict[str, Slice] = {}
        super().__init__(self._slices, Unreadable("slice"), "engines", MAX_ENGINES)
        self._by_service: dict[str, set[str]] = {}
        self._engines: dict[str, dict[str, str]] = {}  # what `engines` returned since the service's last change
        self._trusted: dict[str, dict[str, Doubtful]] = {}
        self.doubted: set[str] = set()
        """Services that have doubtful engines and no ready one."""

    def engines(self, service: str) -> Mapping[str, str]:
        """Return the address of each engine by its pod's uid, or by the address if the slice names no pod.

        If none is ready, these are the doubtful engines that answer.
        """
        by_pod = self._engines.get(service)
        if by_pod is None and service in self._by_service:
            by_pod = self._engines[service] = {}
            for piece in self._pieces(service):
                for pod, address in piece.engines:
                    by_pod.setdefault(pod, address)
            if not by_pod:
                by_pod.update({pod: engine.address for pod, engine in self._trusted.get(service, {}).items()})
        return by_pod or {}

    def find_doubtful(self, service: str) -> dict[str, Doubtful]:
        """Return the doubtful engines of a service by their pods' uids."""
        found: dict[str, Doubtful] = {}
        for piece in self._pieces(service):
            for pod, engine in piece.doubtful:
                found.setdefault(pod, engine)
        return found

    def is_trusted(self, service: str) -> bool:
        """Return whether doubtful engines of the service get requests."""
        return service in self._trusted

    def trust(self, service: str, engines: Mapping[str, Doubtful]) -> None:
        """Send requests to these doubtful engines, and to no others, while no engine of the service is ready."""
        known = self.find_doubtful(service)
        trusted = {pod: engine for pod, engine in engines.items() if known.get(pod) == engine}
        if service in self.doubted and trusted != self._trusted.get(service, {}):
            self._set_trusted(service, trusted)
            self._engines.pop(service, None)
            self._notify(service)

    def _set_trusted(self, service: str, trusted: dict[str, Doubtful]) -> None:
        self._trusted[service] = trusted
        if not trusted:
            del self._trusted[service]

    def _pieces(self, service: str) -> Iterator[Slice]:
        return (self._slices[name] for name in sorted(self._by_service.get(service, ())))

    def _parse(self, body: Json) -> Slice:
        return parse_slice(body)

    def _weigh(self, item: Slice) -> int:
        """Return the number of engines, at least 1, because a slice without engines needs memory too."""
        return max(1, len(item.engines) + len(item.doubtful))

    def _keep(self, key: str, item: Slice) -> None:
        known = self._slices.get(key)
        if known is not None and known.service != item.service:  # its label was edited
            self._drop(key)
        self._slices[key] = item
        self._by_service.setdefault(item.service, set()).add(key)
        self._note_change(item.service)

    def _drop(self, key: str) -> None:
        piece = self._slices.pop(key)
        names = self._by_service[piece.service]
        names.discard(key)
        if not names:
            del self._by_service[piece.service]
        self._note_change(piece.service)

    def _note_change(self, service: str) -> None:
        self._engines.pop(service, None)
        doubtful = {} if any(piece.engines for piece in self._pieces(service)) else self.find_doubtful(service)
        (self.doubted.add if doubtful else self.doubted.discard)(service)
        trusted = self._trusted.get(service, {})
        self._set_trusted(service, {pod: each for pod, each in trusted.items() if doubtful.get(pod) == each})
        self._notify(service)
