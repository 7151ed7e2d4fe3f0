"""What the gateway knows of the cluster: the InferenceServices, and the engines of each that are ready.

Filled by `conveyor_kube.watch` with bodies from the API server; read by `routing` and `relaying`; `queues` is told what
changed. A service is known because its InferenceService exists, not because a pod was seen: one without engines queues.
Knows the shape of an InferenceService, as `slices` knows that of an EndpointSlice; not how they are fetched.
"""

import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from conveyor_api.conditions import LASTING_FAILURES, ConditionType, Reason
from conveyor_api.resource import InferenceService
from conveyor_gateway.watching.namespace_limits import NamespaceLimit
from conveyor_gateway.watching.slices import SliceTable
from conveyor_gateway.watching.table import Table
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json

LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# Of one namespace. More than anybody runs; a tenant may create far more.
MAX_SERVICES: Final = 5_000


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
    max_queued_requests: int  # at all gateways
    queue_timeout_seconds: float
    request_timeout_seconds: float
    max_model_len: int | None = None  # tokens of the longest request; None: not known yet
    idle_timeout_seconds: float | None = None  # without a request, until it goes to zero; None: it never does
    is_asleep: bool = False  # at zero for want of requests; the next one wakes it
    is_starting: bool = False  # from zero, and nothing has failed
    start_failure: str = ""  # why the start from zero fails, if waiting does not help

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def answers_from_zero(self) -> bool:
        """Without an engine it answers all the same."""
        return self.is_asleep or self.is_starting


def parse_service(body: Mapping[str, Any]) -> Service:
    """Raises InvalidResource."""
    resource = InferenceService.parse(body)
    created = resource.metadata.creation_timestamp
    spec, batching = resource.spec, resource.spec.batching
    idle_timeout_seconds = spec.autoscaling.idle_timeout_seconds if spec.autoscaling else None
    return Service(
        namespace=resource.namespace,
        name=resource.name,
        model_name=resource.served_model_name,
        created_unix=int(datetime.fromisoformat(created).timestamp()) if created else 0,
        batch_size=batching.effective_batch_size,
        place_limit=batching.engine_place_limit,
        window_seconds=batching.window_seconds,
        max_queued_requests=spec.queue.max_requests,
        queue_timeout_seconds=spec.queue.timeout_seconds,
        request_timeout_seconds=spec.request_timeout_seconds,
        max_model_len=spec.engine.max_model_len or _made_for(resource),
        idle_timeout_seconds=idle_timeout_seconds,
        is_asleep=idle_timeout_seconds is not None and resource.status.desired_replicas == 0,
        is_starting=any(condition.reason == Reason.STARTING_FROM_ZERO for condition in resource.status.conditions),
        start_failure=_find_start_failure(resource) if idle_timeout_seconds is not None else "",
    )


def _find_start_failure(resource: InferenceService) -> str:
    """The reason that Ready is False for, if waiting does not mend it and it is about the present spec."""
    status = resource.status
    if status.observed_generation != resource.metadata.generation:
        return ""
    ready = (each for each in status.conditions if (each.type, each.status) == (ConditionType.READY, "False"))
    return next((each.reason for each in ready if each.reason in LASTING_FAILURES), "")


def _made_for(resource: InferenceService) -> int | None:
    """The model's own limit, if the status tells it of the model that the spec has now."""
    model = resource.status.model
    return model.context_length if model is not None and model.uri == resource.spec.model.uri else None


# A model name of this form may be the `namespace/name` of some service, now or later.
_KEY = re.compile(rf"({LABEL})/{LABEL}")


class Directory:
    """All services by `namespace/name`, and which of them a model name stands for on the root."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self._keys: list[str] = []  # of all services, in order
        self._claims: dict[str, set[str]] = {}  # by model name
        self._holders: dict[str, str] = {}

    def put(self, service: Service) -> None:
        self.remove(service.key)
        self.services[service.key] = service
        insort(self._keys, service.key)
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
        if self.services.pop(key, None) is not None:
            del self._keys[bisect_left(self._keys, key)]

    def list_after(self, key: str, count: int) -> list[Service]:
        """The next `count` services after `namespace/name`, in the order of their keys."""
        start = bisect_right(self._keys, key)
        return [self.services[each] for each in self._keys[start : start + count]]

    def find_model(self, model: str) -> Service | None:
        """The service that `model` means: its `namespace/name`, or the name that it was the first to serve."""
        return self.services.get(model) or self.services.get(self._holders.get(model, ""))

    def _age(self, key: str) -> tuple[int, str]:
        return self.services[key].created_unix, key


def _may_claim(service: Service) -> bool:
    """A name that may be another namespace's `namespace/name` has no meaning on the root."""
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
        return tuple(self.slices.engines(service).values())

    def find_engine(self, service: str, pod: str) -> str | None:
        """The address of the ready engine in the pod with this uid."""
        return self.slices.engines(service).get(pod)


class ServiceTable(Table[Service]):
    """The InferenceServices, as a sink of `watch`."""

    def __init__(self, directory: Directory, on_change: Callable[[str], None]) -> None:
        super().__init__(directory.services, Unreadable("service"), NamespaceLimit("InferenceServices", MAX_SERVICES))
        self._directory = directory
        self._on_change = on_change

    def _parse(self, body: Json) -> Service:
        return parse_service(body)

    def _weigh(self, item: Service) -> int:
        return 1

    def _keep(self, key: str, item: Service) -> None:
        self._directory.put(item)
        self._on_change(key)

    def _forget(self, key: str) -> None:
        self._directory.remove(key)
        self._on_change(key)
