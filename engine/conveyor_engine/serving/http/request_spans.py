"""Exports a span for each request that the engine process got, with a part for each phase. Only with a collector.

The parts are prepare (the body's arrival, validation, tokens), wait, prefill and decode. They are made of the receipt,
so they appear once the engine process has ended the request, which may be after its answer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.types import Scope

from conveyor_engine.serving.bill import Bill
from conveyor_process.tracing import TRACE_PARENT_HEADER
from conveyor_protocol.gen_ai import describe_operation
from conveyor_protocol.usage import UsedTokens, describe_used

if TYPE_CHECKING:
    from conveyor_process.otlp import OpenSpan, Tracer

_TRACE_PARENT: Final = TRACE_PARENT_HEADER.encode()


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request whose answer has ended. Times are those of `time.monotonic`."""

    trace_parent: str  # its header; "" without one
    path: str
    response_id: str
    bill: Bill
    count_used: Callable[[], UsedTokens]
    arrived: float
    sent: float  # to the engine process
    ended: float
    error: str  # the kind of failure; empty: none


def find_trace_parent(scope: Scope) -> str:
    """Return the header `traceparent` of an ASGI scope; "" without one."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == _TRACE_PARENT), "")


class RequestSpans:
    """Makes the spans of requests that have ended."""

    def __init__(self, tracer: "Tracer", model: str) -> None:
        """model: the served name."""
        self._tracer = tracer
        self._model = model
        self._waiting: set[asyncio.Task[None]] = set()

    def add(self, request: EndedRequest) -> None:
        """Export the spans of a request once its receipt is complete."""
        operation = describe_operation(request.path)
        name = f"{operation.get('gen_ai.operation.name', request.path)} {self._model}"
        span = self._tracer.start(name, request.arrived, request.trace_parent)
        if not span.is_recording:
            return
        attributes = {**operation, "gen_ai.request.model": self._model, "gen_ai.response.id": request.response_id}
        if request.bill.is_settled:
            _end(span, request, attributes)
            return
        task = asyncio.create_task(_wait_and_end(span, request, attributes))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)


async def _wait_and_end(span: "OpenSpan", request: EndedRequest, attributes: dict[str, str]) -> None:
    await request.bill.wait()
    _end(span, request, attributes)


def _end(span: "OpenSpan", request: EndedRequest, attributes: dict[str, str]) -> None:
    bill = request.bill
    receipt = bill.sum_up()
    span.add_part("prepare", request.arrived, request.sent)
    if first_step := bill.first_step:
        first_token = first_step + receipt.prefill_ms / 1000
        span.add_part("wait", first_step - (receipt.queue_ms + receipt.batch_wait_ms) / 1000, first_step)
        span.add_part("prefill", first_step, first_token)
        if receipt.decode_ms:
            span.add_event("first_token", first_token)
            span.add_part("decode", first_token, first_token + receipt.decode_ms / 1000)
    for at in bill.preempted_at:
        span.add_event("preempted", at)
    used = msgspec.structs.replace(request.count_used(), receipt=receipt)
    span.end(request.ended, {**attributes, **describe_used(used)}, request.error)
