"""The receipts of the last requests, by request id. `record` adds them, and `listening.admin` returns them."""

import asyncio
import heapq
from itertools import count
from typing import Final

import msgspec

from conveyor_protocol.usage import RequestReceipt, SlowestReceipts

RECEIPTS_MAX: Final = 10_000
MAX_BYTES: Final = 8 << 20
_SLOWEST: Final = 10
_READ_A_TURN: Final = 500
_ENTRY_BYTES: Final = 250  # roughly what Python keeps for an entry besides its text


class _Brief(msgspec.Struct):
    """The part of a receipt that is needed to sort it."""

    service: str
    seconds: float


class Receipts:
    """The last receipts. They are kept encoded, so that they cost the garbage collector nothing."""

    def __init__(self, max_number: int = RECEIPTS_MAX, max_bytes: int = MAX_BYTES) -> None:
        self._max_number, self._max_bytes = max_number, max_bytes
        self._encoded: dict[str, bytes] = {}  # the oldest first
        self._num_bytes = 0

    def add(self, receipt: RequestReceipt) -> None:
        """Add a receipt. The oldest ones are dropped, and one of an earlier request with the same id."""
        request_id, encoded = receipt.request_id, msgspec.json.encode(receipt)
        if request_id in self._encoded:
            self._drop(request_id)
        self._encoded[request_id] = encoded
        self._num_bytes += _count_bytes(request_id, encoded)
        while len(self._encoded) > self._max_number or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._encoded)))

    def find(self, request_id: str) -> bytes | None:
        """Return the JSON of the receipt; None if there is none."""
        return self._encoded.get(request_id)

    async def find_slowest(self, service: str) -> SlowestReceipts:
        """Return the slowest requests of a service, the slowest first. Other requests are served in between."""
        slowest: list[tuple[float, int, bytes]] = []
        number, tie = 0, count()
        for read, encoded in enumerate(list(self._encoded.values())):
            brief = msgspec.json.decode(encoded, type=_Brief)
            if brief.service == service:
                number += 1
                push = heapq.heappush if len(slowest) < _SLOWEST else heapq.heappushpop
                push(slowest, (brief.seconds, next(tie), encoded))
            if read % _READ_A_TURN == 0:
                await asyncio.sleep(0)
        found = [msgspec.json.decode(encoded, type=RequestReceipt) for *_, encoded in sorted(slowest, reverse=True)]
        return SlowestReceipts(found, number)

    def _drop(self, request_id: str) -> None:
        self._num_bytes -= _count_bytes(request_id, self._encoded.pop(request_id))


def _count_bytes(request_id: str, encoded: bytes) -> int:
    return _ENTRY_BYTES + len(request_id) + len(encoded)
