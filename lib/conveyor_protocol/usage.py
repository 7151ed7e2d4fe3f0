"""What requests have used: the reports of engines to gateways, and the receipts that gateways keep.

Engines run tenants' images, so the gateway checks a report. A reader ignores unknown fields, and fields with a default
may be missing, because the other program may be of an earlier release.
"""

from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict

TokenCount = Annotated[int, Meta(ge=0, le=10**9)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e10)]


class EngineReceipt(Struct, frozen=True, kw_only=True, array_like=True):
    """What a request has used of its engine's steps, and where its time there went.

    The `engine_ms` of all requests add up to the time of all steps. With several inputs or choices, `engine_ms`,
    `padding_ms` and `preempted` are sums, and the others are those of the slowest one.
    """

    engine_ms: Milliseconds
    """Its part of the time of its steps."""
    padding_ms: Milliseconds
    """What dummy tokens cost of that."""
    queue_ms: Milliseconds
    """From its arrival at the engine process to its first step, without `batch_wait_ms`."""
    batch_wait_ms: Milliseconds
    """How long its batch was not started, although it could have run."""
    prefill_ms: Milliseconds
    """From its first step to its first token or its result."""
    decode_ms: Milliseconds
    """From its first token to its end."""
    neighbours: Annotated[float, Meta(ge=0, le=1e6)]
    """Mean number of other requests in its steps."""
    preempted: TokenCount
    """How often it lost its place in the batch, because KV blocks ran out."""
    closed_by: Annotated[str, Meta(pattern="^[a-z_]{1,32}$")] | None
    """Why its batch closed; None in mode Continuous, whose batch never closes."""


class UsedTokens(Struct, frozen=True, omit_defaults=True):
    """The tokens of one request. A prompt counts once for any `n`, and only if it was computed."""

    prompt_tokens: TokenCount
    cached_tokens: TokenCount
    """Those of the prompt that were in the prefix cache."""
    completion_tokens: TokenCount
    is_final: bool = True
    """False if the engine process has not ended all of the request yet. `GET /usage` waits until it has."""
    receipt: EngineReceipt | None = None
    """None if the request has not ended."""
    error: Annotated[str, Meta(pattern="^[A-Za-z]{0,64}$")] = ""
    """The error of the engine with which a stream has ended after its beginning; "" without one."""


def describe_used(used: UsedTokens) -> dict[str, str | int | float]:
    """Return the attributes of a span: tokens by OpenTelemetry's conventions, and the receipt's fields."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.usage.input_tokens": used.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": used.cached_tokens,
        "gen_ai.usage.output_tokens": used.completion_tokens,
    }
    if used.receipt is not None:
        fields = asdict(used.receipt).items()
        attributes |= {f"conveyor.{name}": value for name, value in fields if value is not None}
    return attributes


class RequestReceipt(Struct, frozen=True, kw_only=True):
    """`GET /receipt?id=<request id>`: where the time of a request went that has ended at this gateway.

    The newest one, if several requests had the id. All times are in seconds.
    """

    request_id: str
    service: str
    path: str
    client: str
    gateway: str
    engine: str
    """Its address; "-" if no engine got the request."""
    status: int
    reason: str
    """The code of the gateway's error; "-" if an engine's answer was forwarded whole."""
    attempts: TokenCount
    ended_unix: float
    seconds: float
    """From its arrival to its end."""
    queue_seconds: float
    """In the gateway's queue."""
    first_byte_seconds: float | None
    """From its arrival to the first byte of its answer."""
    engine_seconds: float
    """At engines, including their queues."""
    used: UsedTokens | None
    """What the engine reports; None if it reports nothing."""


class SlowestReceipts(Struct, frozen=True):
    """`GET /receipts?service=<namespace>/<name>`: the slowest requests of those whose receipts this gateway keeps."""

    receipts: list[RequestReceipt]
    num_kept: TokenCount
    """Receipts of this service that it keeps."""
