"""The pages of a gateway's admin port that other programs read, in the one form that both sides use.

`/demand` goes to the metrics server, `/activity` and `/start` to the operator. A reader ignores members that it does
not know, and a member with a default may be missing: gateways of an earlier release answer too.
Services are `namespace/name`, engines `host:port`.
"""

from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
ServiceKey = Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,63}/[a-z0-9-]{1,63}$")]


class EngineDemand(Struct, frozen=True):
    """An engine as one gateway knows it."""

    dispatched: Count
    """Of this gateway's requests there, those that came longer than the batching window ago."""
    waiting: Count | None
    """Of all gateways' requests there, those that wait for a place in its batch. None: it does not say."""
    carried: AtLeastOne | None = None
    """How many requests its KV cache holds at once, where that was short lately."""


class ServiceDemand(Struct, frozen=True):
    """What one gateway holds for one InferenceService."""

    in_flight: Count
    """Queued and dispatched."""
    queue_depth: Count
    """Queued longer than the batching window."""
    queued: Count = 0
    dispatched: Count = 0
    batch_size: AtLeastOne = 1
    """How many one engine runs at once."""
    engines: dict[str, EngineDemand] = {}
    """Those with requests of this gateway."""


class Demand(Struct, frozen=True):
    """`GET /demand?service=<namespace>/<name>`: a known service is listed with its zeros, an unknown one is not."""

    services: dict[str, ServiceDemand]


class Activity(Struct, frozen=True):
    """`GET /activity`: which services that may go to zero have to be woken, and which may go to sleep."""

    services: Count
    """How many may go to zero."""
    waiting: frozenset[ServiceKey]
    """Asleep, with requests here."""
    idle: frozenset[ServiceKey]
    """With engines, and for its idle timeout without a request here."""


class Start(Struct, frozen=True):
    """`GET /start?service=<namespace>/<name>&pod=<uid>`: how the engine in that pod started."""

    warm_up_seconds: Annotated[float, Meta(ge=0)] | None
    """None: this engine does not say."""
