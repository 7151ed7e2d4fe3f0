"""The receipt that an answer has if the request has the header `X-Receipt: true`.

An answer with a `usage` has it there, in a stream in the last `usage`. Other answers have it as a header.
"""

import socket
from collections.abc import MutableMapping
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from conveyor_engine.serving.bill import Bill
from conveyor_protocol.request_headers import RECEIPT_HEADER, ReceiptRequest, parse_receipt_request

_HEADER: Final = RECEIPT_HEADER.lower().encode()


class Receipt(msgspec.Struct, kw_only=True):
    """What the request has used, and where its time went, in milliseconds. Only with the header `X-Receipt: true`.

    With several inputs or choices, `engine_ms`, `padding_ms` and `preempted` are sums, and the other numbers are those
    of the slowest one.
    """

    engine: str
    engine_ms: float
    padding_ms: float
    queue_ms: float
    batch_wait_ms: float
    prefill_ms: float
    decode_ms: float
    closed_by: str | None
    neighbours: float
    preempted: int
    cached_tokens: int | UnsetType = UNSET
    gateway: str | UnsetType = UNSET
    gateway_queue_ms: float | UnsetType = UNSET


def find_receipt_request(scope: MutableMapping[str, Any]) -> ReceiptRequest | None:
    """Return the request for a receipt in the headers of an ASGI scope; None without one."""
    value = next((value for name, value in scope["headers"] if name == _HEADER), None)
    return None if value is None else parse_receipt_request(value.decode("latin-1"))


def build_receipt(bill: Bill, request: ReceiptRequest, cached_tokens: int | UnsetType = UNSET) -> Receipt:
    """Build the receipt. cached_tokens: UNSET if the count would reveal what other clients have sent."""
    total = bill.sum_up()
    return Receipt(
        engine=socket.gethostname(),
        engine_ms=total.engine_ms,
        padding_ms=total.padding_ms,
        queue_ms=total.queue_ms,
        batch_wait_ms=total.batch_wait_ms,
        prefill_ms=total.prefill_ms,
        decode_ms=total.decode_ms,
        closed_by=total.closed_by,
        neighbours=total.neighbours,
        preempted=total.preempted,
        cached_tokens=cached_tokens,
        gateway=request.gateway or UNSET,
        gateway_queue_ms=request.queue_ms if request.gateway else UNSET,
    )
