"""The gateway's view of the cluster: InferenceServices, the owners of served names, and ready engines.

`conveyor_kube.watch` fills the catalog with bodies from the API server. `routing`, `relaying` and others read it. The
catalog notifies `queues` of changes. A service is known as soon as its InferenceService exists. Its requests are queued
while it has no engines.

This module parses InferenceServices, and `slices` parses EndpointSlices. Neither module knows how objects are fetched.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from conveyor_api.adapters import ADAPTER_SLOTS, SEPARATOR
from conveyor_api.conditions import LASTING_FAILURES, ConditionType, Reason
from conveyor_api.resource import InferenceService
from conveyor_api.spec import InferenceServiceSpec
from conveyor_api.status import MAX_LISTED_ADAPTERS
from conveyor_gateway.settings import DefaultAccess
from conveyor_gateway.watching.access import WITHOUT_RULES, Rules, parse_rules
from conveyor_gateway.watching.classes import WITHOUT_CLASSES, QueueClasses, parse_classes
from conveyor_gateway.watching.issuer import Issuer
from conveyor_gateway.watching.keys import KeyTable
from conveyor_gateway.watching.slices import SliceTable
from conveyor_gateway.watching.table import Table
from conveyor_kube.served_names import ClaimSink, NameIndex
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_protocol.pages import Targets

# The limit for each namespace: above any real use, but a tenant could create more.
MAX_SERVICES: Final = 5_000


@dataclass(frozen=True, slots=True)
class Service:
    """The fields of an InferenceService that the gateway uses."""

    namespace: str
    name: str
    model_name: str
    listed: bool  # whether the root's `/v1/models` lists it
    created_unix: int  # seconds
    batch_size: int  # requests that one engine runs at once
    place_limit: int  # requests that this gateway may have on one engine
    window_seconds: float  # how long a batch may take to fill; the queue depth counts only longer waits
    max_queued_requests: int  # at all gateways
    queue_timeout_seconds: float
    request_timeout_seconds: float
    task: str | None = None  # of the model; None: not known
    max_model_len: int | None = None  # longest prompt and answer together, in tokens; None: not known yet
    idle_timeout_seconds: float | None = None  # time without requests until it scales to zero; None: never
    is_asleep: bool = False  # scaled to zero because it was idle; the next request starts it
    is_starting: bool = False  # it starts from zero, without a failure so far
    classes: QueueClasses = WITHOUT_CLASSES
    refuses_priority: bool = False  # `priority` in a body has no effect, so it is rejected
    start_failure: str = ""  # why no engine can start until somebody acts
    adapters: Mapping[str, None] = field(default_factory=dict)  # names of LoRA adapters, in their order
    coming_adapters: frozenset[str] = frozenset()  # those of them that engines have, or load while they run
    is_rolling_out: bool = False  # engines of the current spec are still to come
    desired_replicas: int | None = None  # None: not known yet
    starting_replicas: int = 0  # pods that are not ready and do not fail
    starting_until_unix: float = math.inf  # when this number lapses
    targets: Targets | None = None  # of Conveyor's autoscaler
    rules: Rules = WITHOUT_RULES  # who may use it

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def find_scarce_adapter(self, model: str) -> str:
        """Return the adapter that a `model` names if engines do not have all adapters loaded; otherwise ""."""
        adapter = model.rpartition(SEPARATOR)[2]
        return adapter if len(self.adapters) > ADAPTER_SLOTS and adapter in self.adapters else ""

    @property
    def answers_from_zero(self) -> bool:
        """Whether a request is answered although no engine runs: one is starting, or the request starts one."""
        return self.is_asleep or self.is_starting


class NamedModel(NamedTuple):
    """The model of a service, or one of its adapters."""

    service: Service
    adapter: str = ""

    @property
    def engine_name(self) -> str:
        """Return the name with which the service's engines know it."""
        return join_names(self.service.model_name, self.adapter) if self.adapter else self.service.model_name


def join_names(model: str, adapter: str) -> str:
    """Return the name of the model's adapter; the model's own name without an adapter."""
    return f"{model}{SEPARATOR}{adapter}" if adapter else model


def parse_service(body: Mapping[str, Any]) -> Service:
    """Parse an InferenceService. Raises InvalidResource."""
    resource = InferenceService.parse(body)
    created = resource.metadata.creation_timestamp
    spec, batching = resource.spec, resource.batching
    idle_timeout_seconds = spec.autoscaling.idle_timeout_seconds if spec.autoscaling else None
    return Service(
        namespace=resource.namespace,
        name=resource.name,
        model_name=resource.served_model_name,
        task=resource.task if spec.runtime == "Conveyor" else None,
        listed=spec.listed,
        created_unix=int(datetime.fromisoformat(created).timestamp()) if created else 0,
        batch_size=batching.effective_batch_size,
        place_limit=batching.engine_place_limit,
        window_seconds=batching.window_seconds,
        max_queued_requests=spec.queue.max_requests,
        queue_timeout_seconds=spec.queue.timeout_seconds,
        request_timeout_seconds=spec.request_timeout_seconds,
        max_model_len=resource.max_model_len,
        idle_timeout_seconds=idle_timeout_seconds,
        is_asleep=idle_timeout_seconds is not None and resource.status.desired_replicas == 0,
        is_starting=any(condition.reason == Reason.STARTING_FROM_ZERO for condition in resource.status.conditions),
        classes=parse_classes(spec.queue),
        refuses_priority=spec.runtime == "Conveyor" and not spec.queue.classes,
        start_failure=_find_start_failure(resource),
        adapters=dict.fromkeys(adapter.name for adapter in spec.adapters),
        coming_adapters=_find_coming_adapters(resource),
        is_rolling_out=_find_rollout(resource),
        desired_replicas=resource.status.desired_replicas,
        starting_replicas=resource.status.starting_replicas or 0,
        starting_until_unix=resource.status.starting_until_unix,
        targets=_find_targets(resource.settled_spec),
        rules=parse_rules(spec.access),
    )


def _find_targets(spec: InferenceServiceSpec) -> Targets | None:
    in_flight, queue_depth = spec.in_flight_target, spec.queue_depth_target
    if in_flight is None or queue_depth is None or (spec.autoscaling and spec.autoscaling.is_external):
        return None
    return Targets(in_flight, queue_depth)


def _find_coming_adapters(resource: InferenceService) -> frozenset[str]:
    """Return the adapters that engines have or load. A full list in the status leaves out some that are Ready."""
    listed = {each.name: each for each in resource.status.adapters}
    coming = {name for name, each in listed.items() if each.state != "Failed" or each.replicas}
    if len(listed) >= MAX_LISTED_ADAPTERS:
        coming |= {each.name for each in resource.spec.adapters} - listed.keys()
    return frozenset(coming)


def _find_start_failure(resource: InferenceService) -> str:
    """Return the reason why Ready is False, if it is a lasting failure of the current spec; otherwise ""."""
    status = resource.status
    if status.observed_generation != resource.metadata.generation:
        return ""
    ready = (each for each in status.conditions if (each.type, each.status) == (ConditionType.READY, "False"))
    return next((each.reason for each in ready if each.reason in LASTING_FAILURES), "")


def _find_rollout(resource: InferenceService) -> bool:
    """Return whether engines of the current spec are still to come, and no lasting failure keeps them from coming."""
    status = resource.status
    if status.observed_generation != resource.metadata.generation:
        return True
    return any((each.type, each.status) == (ConditionType.PROGRESSING, "True") for each in status.conditions)


class Directory:
    """All services by `namespace/name`, and the service that each model name selects at the root.

    Clients see it through a `View`.
    """

    def __init__(self, default_access: DefaultAccess = "Open") -> None:
        self.default_access: Final[DefaultAccess] = default_access
        self.services: dict[str, Service] = {}
        self.num_guarded = 0  # services that need a proof
        self.names = NameIndex()
        self._keys: list[str] = []  # of all services, sorted
        self._listed: list[str] = []  # of services with `listed`, sorted

    def put(self, service: Service) -> None:
        self.remove(service.key)
        self.services[service.key] = service
        self.num_guarded += service.rules.need_proof(self.default_access)
        self.names.put_service(service.key, service.model_name, service.created_unix)
        for keys in self._orders(service):
            insort(keys, service.key)

    def remove(self, key: str) -> None:
        service = self.services.pop(key, None)
        if service is not None:
            self.num_guarded -= service.rules.need_proof(self.default_access)
            self.names.remove_service(key)
            for keys in self._orders(service):
                del keys[bisect_left(keys, key)]

    def list_after(self, key: str, count: int, lists_all: bool) -> list[Service]:
        """Return the next `count` services after `key`, sorted by key. Without `lists_all`, only listed services."""
        keys = self._keys if lists_all else self._listed
        start = bisect_right(keys, key)
        return [self.services[each] for each in keys[start : start + count]]

    def find_model(self, model: str) -> NamedModel | None:
        """Return the model for a `namespace/name` or a claimed model name; None without one.

        A colon and the name of an adapter may follow. Names that begin with a `namespace/name` come first, because
        they belong to that namespace (docs/adr/0120).
        """
        if (service := self.services.get(model)) is not None:
            return NamedModel(service)
        if SEPARATOR not in model:
            service = self.services.get(self.names.find_service(model) or "")
            return NamedModel(service) if service is not None else None
        base, _, adapter = model.rpartition(SEPARATOR)
        if (service := self.services.get(base)) is not None and adapter in service.adapters:
            return NamedModel(service, adapter)
        if (service := self.services.get(self.names.find_service(model) or "")) is not None:
            return NamedModel(service)
        service = self.services.get(self.names.find_service(base) or "")
        return NamedModel(service, adapter) if service is not None and adapter in service.adapters else None

    def is_coming(self, key: str, model: str) -> bool:
        """Return whether engines of the service `key` will serve the model of this name, or others do already.

        Either a rollout brings such engines, or they load an adapter while they run.
        """
        service = self.services.get(key)
        if service is None:
            return False
        adapter = model[len(service.model_name) + 1 :]
        if model != join_names(service.model_name, adapter) or (adapter and adapter not in service.adapters):
            return False
        return service.is_rolling_out or adapter in service.coming_adapters

    def _orders(self, service: Service) -> list[list[str]]:
        return [self._keys, self._listed] if service.listed else [self._keys]


class Catalog:
    """All watched resources. `conveyor_kube.watch` keeps them up to date."""

    def __init__(self, default_access: DefaultAccess = "Open") -> None:
        self.directory = Directory(default_access)
        self.services = ServiceTable(self.directory)
        self.claims = ClaimSink(self.directory.names)
        self.slices = SliceTable()
        self.keys = KeyTable()
        self.issuer = Issuer()

    def subscribe(self, on_service: Callable[[str], None], on_engines: Callable[[str], None]) -> None:
        """Call the functions with `namespace/name` after each later change of a service, or of its engines."""
        self.services.subscribe(on_service)
        self.slices.subscribe(on_engines)

    def engines(self, service: str) -> tuple[str, ...]:
        """Return the addresses (`host:port`) of the ready engines, one for each pod."""
        return tuple(self.slices.engines(service).values())

    def find_engine(self, service: str, pod: str) -> str | None:
        """Return the address of the ready engine in the pod with this uid; None without one."""
        return self.slices.engines(service).get(pod)


class ServiceTable(Table[Service]):
    """The InferenceServices, as a sink of `watch`."""

    def __init__(self, directory: Directory) -> None:
        super().__init__(directory.services, Unreadable("service"), "InferenceServices", MAX_SERVICES)
        self._directory = directory

    def _parse(self, body: Json) -> Service:
        return parse_service(body)

    def _weigh(self, item: Service) -> int:
        return 1

    def _keep(self, key: str, item: Service) -> None:
        self._directory.put(item)
        self._notify(key)

    def _drop(self, key: str) -> None:
        self._directory.remove(key)
        self._notify(key)
