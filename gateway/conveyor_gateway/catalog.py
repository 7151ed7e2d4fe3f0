"""What the gateway knows of the cluster: the InferenceServices, and the engines of each that are ready.

Filled by `watch` with bodies from the API server; read by `routing` and `gateway`; `queues` is told what changed.
A service is known because its InferenceService exists, not because a pod was seen: one without engines queues.
Knows the shapes of the two resources, not how they are fetched.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from conveyor_api.names import ENGINE_PORT_NAME, INFERENCE_SERVICE_LABEL
from conveyor_api.resource import InferenceService
from conveyor_gateway.unreadable import Unreadable
from conveyor_gateway.wanted_json import Json

LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NO_ENGINES: Final[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class Service:
    """What the gateway needs of one InferenceService."""

    namespace: str
    name: str
    model_name: str
    created_unix: int  # seconds
    batch_size: int  # requests that one engine runs at once
    place_limit: int  # requests that this gateway may have on one engine
    window_seconds: float  # how long a request may wait for its batch before it counts as waiting
    max_queued_requests: int
    queue_timeout_seconds: float
    request_timeout_seconds: float
    max_model_len: int | None = None  # tokens of the longest request; None: not known yet

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_service(body: Mapping[str, Any]) -> Service:
    """Raises InvalidResource."""
    resource = InferenceService.parse(body)
    created = resource.metadata.creation_timestamp
    batching, endpoint = resource.spec.batching, resource.spec.endpoint
    return Service(
        namespace=resource.namespace,
        name=resource.name,
        model_name=resource.served_model_name,
        created_unix=int(datetime.fromisoformat(created).timestamp()) if created else 0,
        batch_size=batching.effective_batch_size,
        place_limit=batching.engine_place_limit,
        window_seconds=batching.window_seconds,
        max_queued_requests=endpoint.max_queued_requests,
        queue_timeout_seconds=endpoint.queue_timeout_seconds,
        request_timeout_seconds=endpoint.request_timeout_seconds,
        max_model_len=resource.spec.engine.max_model_len or _made_for(resource),
    )


def _made_for(resource: InferenceService) -> int | None:
    """The model's own limit, if the status tells it of the model that the spec has now."""
    model = resource.status.model
    return model.context_length if model is not None and model.uri == resource.spec.model.uri else None


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


# A model name of this form may be the `namespace/name` of some service, now or later.
_KEY = re.compile(rf"({LABEL})/{LABEL}")


class Directory:
    """All services by `namespace/name`, and which of them a model name stands for on the root."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self._claims: dict[str, set[str]] = {}  # by model name
        self._holders: dict[str, str] = {}

    def put(self, service: Service) -> None:
        self.remove(service.key)
        self.services[service.key] = service
        if _may_claim(service):
            self._claims.setdefault(service.model_name, set()).add(service.key)
            holder = self._holders.setdefault(service.model_name, service.key)
            self._holders[service.model_name] = min(holder, service.key, key=self._age)

    def remove(self, key: str) -> None:
        service = self.services.get(key)
        if service is not None and key in (claims := self._claims.get(service.model_name, set())):
            claims.discard(key)
            if not claims:
                del self._claims[service.model_name], self._holders[service.model_name]
            elif self._holders[service.model_name] == key:
                self._holders[service.model_name] = min(claims, key=self._age)
        self.services.pop(key, None)

    def find_model(self, model: str) -> Service | None:
        """The service that `model` means: its `namespace/name`, or the name that it was the first to serve."""
        return self.services.get(model) or self.services.get(self._holders.get(model, ""))

    def _age(self, key: str) -> tuple[int, str]:
        return self.services[key].created_unix, key


def _may_claim(service: Service) -> bool:
    """A name that may be another namespace's `namespace/name` is nobody's on the root."""
    match = _KEY.fullmatch(service.model_name)
    return match is None or match[1] == service.namespace


class Catalog:
    """Both resources, kept by `watch`. `on_service(key)` and `on_engines(key)` are called after each change."""

    def __init__(self, on_service: Callable[[str], None], on_engines: Callable[[str], None]) -> None:
        self.directory = Directory()
        self.services = ServiceTable(self.directory, on_service)
        self.slices = SliceTable(on_engines)

    def engines(self, service: str) -> tuple[str, ...]:
        """Addresses (`host:port`) of the ready engines, one per pod."""
        return self.slices.engines(service)


class ServiceTable:
    """The InferenceServices, as a sink of `watch`."""

    def __init__(self, directory: Directory, on_change: Callable[[str], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self.unreadable = Unreadable("service")

    def replace(self, bodies: Iterable[Json], namespace: str) -> None:
        """`bodies` is all there is in `namespace` (empty: in all of them): what is not among them is gone."""
        seen = {self.put(body) for body in bodies}
        self.unreadable.forget_others(seen, namespace)
        for key in _within(namespace, self._directory.services) - seen:
            self._directory.remove(key)
            self._on_change(key)

    def put(self, body: Json) -> str:
        """Takes a new or changed resource; one that cannot be read keeps what was known of it."""
        key = _key(body)
        service = self.unreadable.parse(key, parse_service, body)
        if service is not None and self._directory.services.get(key) != service:
            self._directory.put(service)
            self._on_change(key)
        return key

    def delete(self, body: Json) -> None:
        key = _key(body)
        self.unreadable.forget(key)
        self._directory.remove(key)
        self._on_change(key)


class SliceTable:
    """The EndpointSlices of engines, as a sink of `watch`."""

    def __init__(self, on_change: Callable[[str], None]) -> None:
        self._on_change = on_change
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

    def replace(self, bodies: Iterable[Json], namespace: str) -> None:
        """`bodies` is all there is in `namespace` (empty: in all of them): what is not among them is gone."""
        seen = {self.put(body) for body in bodies}
        self.unreadable.forget_others(seen, namespace)
        for key in _within(namespace, self._slices) - seen:
            self._remove(key)

    def put(self, body: Json) -> str:
        """As `ServiceTable.put`."""
        key = _key(body)
        piece = self.unreadable.parse(key, parse_slice, body)
        known = self._slices.get(key)
        if piece is not None and known != piece:
            if known is not None and known.service != piece.service:  # its label was edited
                self._remove(key)
            self._slices[key] = piece
            self._by_service.setdefault(piece.service, set()).add(key)
            self._on_change(piece.service)
        return key

    def delete(self, body: Json) -> None:
        key = _key(body)
        self.unreadable.forget(key)
        self._remove(key)

    def _remove(self, key: str) -> None:
        if (piece := self._slices.pop(key, None)) is not None:
            names = self._by_service[piece.service]
            names.discard(key)
            if not names:
                del self._by_service[piece.service]
            self._on_change(piece.service)


def _key(body: Json) -> str:
    metadata = body["metadata"]
    return f"{metadata['namespace']}/{metadata['name']}"


def _within(namespace: str, keys: Iterable[str]) -> set[str]:
    return {key for key in keys if not namespace or key.startswith(f"{namespace}/")}
