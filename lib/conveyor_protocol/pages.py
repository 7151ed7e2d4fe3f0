"""The pages of a gateway's admin port that other programs read. Both sides use these types.

The metrics server reads `/demand`, the console `/demand` and `/engines`, and the operator `/activity` and `/start`. A
reader ignores unknown fields, and fields with a default may be missing, because gateways of an earlier release may
respond. The key of a service is `namespace/name`, and the key of an engine is `host:port`.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
ServiceKey = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,63}/[a-z0-9-]{1,63}$")]


class EngineDemand(Struct, frozen=True):
    """What one gateway knows about an engine."""

    dispatched: Count
    """Number of this gateway's requests at the engine that are older than the batching window."""
    waiting: Count | None
    """Requests of all gateways that wait inside the engine for a place in its batch; None if not reported."""
    carried: AtLeastOne | None = None
    """Requests that the engine runs at once, if its KV cache or its objectives allow fewer than a batch."""
    limit_reason: str | None = None
    """The reason for `carried`, if the engine has objectives: see `limit_reasons`."""


class ClassDemand(Struct, frozen=True):
    """The waiting requests of one class of `queue.classes` at one gateway."""

    queued: Count
    wait_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """How long the first queued request of the class has waited."""


class Replicas(Struct, frozen=True):
    """The replicas of a service, as one gateway sees them. Every gateway reports all replicas."""

    ready: Count
    """Number of engines that accept requests."""
    starting: Count
    """Number of desired replicas that are not ready yet, without those that fail to start."""
    desired: Count


class Targets(Struct, frozen=True):
    """With how many requests per replica Conveyor's autoscaler compares each metric."""

    in_flight: Annotated[float, Meta(gt=0)]
    queue_depth: Annotated[float, Meta(gt=0)]


class ServiceDemand(Struct, frozen=True):
    """The requests that one gateway holds for one InferenceService."""

    in_flight: Count
    """Number of requests that are queued or dispatched."""
    queue_depth: Count
    """Number of requests that have been queued for longer than the batching window."""
    queued: Count = 0
    dispatched: Count = 0
    from_start: Count = 0
    """Number of dispatched requests that arrived while no engine was ready."""
    batch_size: AtLeastOne = 1
    """Number of requests that one engine runs at once."""
    engines: dict[str, EngineDemand] = {}
    """By address, the engines at which this gateway has a request older than the batching window."""
    replicas: Replicas | None = None
    targets: Targets | None = None
    """None if Conveyor's autoscaler does not set the replicas."""
    classes: dict[str, ClassDemand] = {}
    """The classes by name; empty for a service without classes."""


class Demand(Struct, frozen=True):
    """`GET /demand?service=<namespace>/<name>`. A known service without requests is listed with zeros."""

    services: dict[str, ServiceDemand]


class WaitingClient(Struct, frozen=True, array_like=True):
    """The queued requests of one client and one class at one gateway."""

    client: Annotated[str, Meta(max_length=384)]
    """The caller's name, `NAMESPACE/*` for callers of another namespace than the service's, or an address."""
    request_class: Annotated[str, Meta(max_length=63)]
    """Empty for services without classes. A request that its class delays counts for the least urgent one."""
    queued: Count
    wait_seconds: Annotated[float, Meta(ge=0)]
    """How long the client's first request has waited."""


class WaitingClients(Struct, frozen=True):
    """`GET /waiting?service=<namespace>/<name>`: of each class the clients that wait longest, and the one with most
    requests.
    """

    clients: list[WaitingClient]


class Activity(Struct, frozen=True):
    """`GET /activity`: which services must start from zero, and which may scale to zero."""

    services: Count
    """Number of services that may scale to zero."""
    waiting: frozenset[ServiceKey]
    """Services at zero that have requests at this gateway."""
    idle: frozenset[ServiceKey]
    """Services that have engines and had no request at this gateway during their idle timeout."""


class AdapterCounts(Struct, frozen=True):
    """How many engines have loaded an adapter, cannot load it, and answer requests for its name."""

    ready: Count = 0
    failed: Count = 0
    serving: Count = 0
    message: Annotated[str, Meta(max_length=1000)] = ""
    """Why one of the engines cannot load it."""


class Adapters(Struct, frozen=True):
    """`GET /adapters?service=<namespace>/<name>`: what the service's ready engines have made of its adapters.

    By name, and then by directory: an engine may still have an adapter that an earlier spec had under this name.
    """

    adapters: dict[str, dict[str, AdapterCounts]]


ENGINE_FAMILIES: Final = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:generation_tokens_total",
    "vllm:kv_cache_usage_perc",
)
"""The families of an engine's metrics that `Engines` contains. Engines with `runtime: VLLM` have them too."""


class Engines(Struct, frozen=True):
    """`GET /engines?service=<namespace>/<name>`: the lines of engines' metrics that are of ENGINE_FAMILIES.

    By engine, in Prometheus' text format, as the engines returned them. Engines that do not answer are left out, and so
    are all but the first ones of a service with many.
    """

    engines: dict[str, str]


class Start(Struct, frozen=True):
    """`GET /start?service=<namespace>/<name>&pod=<uid>`: how the engine in that pod started."""

    warm_up_seconds: Annotated[float, Meta(ge=0)] | None
    """How long the warm-up took; None if the engine does not report it."""
