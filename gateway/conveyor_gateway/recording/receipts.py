"""The receipts of the last requests, by request id and service. `record` adds them, and `listening.admin` returns them.

Clients choose the ids: one that repeats the id of another service's request replaces no receipt of it.
"""

import asyncio
import heapq
from itertools import count
from typing import Final

import msgspec

from conveyor_protocol.usage import RequestReceipt, SlowestReceipts

RECEIPTS_MAX: Final = 10_000
MAX_BYTES: Final = 8 << 20
_SLOWEST: Final = 10
_SERVICES_MAX: Final = 50  # of one request id
_READ_A_TURN: Final = 500
_ENTRY_BYTES: Final = 500  # roughly what Python keeps for an entry besides its text


class _Brief(msgspec.Struct):
    """The part of a receipt that is needed to sort it."""

    service: str
    seconds: float


class Receipts:
    """The last receipts. They are kept encoded, so that they cost the garbage collector nothing."""

    def __init__(self, max_number: int = RECEIPTS_MAX, max_bytes: int = MAX_BYTES) -> None:
        self._max_number, self._max_bytes = max_number, max_bytes
        self._encoded: dict[tuple[str, str], bytes] = {}  # by id and service, the oldest first
        self._services: dict[str, list[str]] = {}  # by id, the oldest receipt first
        self._num_bytes = 0

    def add(self, receipt: RequestReceipt) -> None:
        """Add a receipt. The oldest ones are dropped, and one of an earlier request of the service with the same id."""
        key, encoded = (receipt.request_id, receipt.service), msgspec.json.encode(receipt)
        if key in self._encoded:
            self._drop(key)
        services = self._services.setdefault(receipt.request_id, [])
        if len(services) >= _SERVICES_MAX:
            self._drop((receipt.request_id, services[0]))
        services.append(receipt.service)
        self._encoded[key] = encoded
        self._num_bytes += _count_bytes(key, encoded)
        while len(self._encoded) > self._max_number or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._encoded)))

    def find(self, request_id: str) -> bytes | None:
        """Return a JSON list of the last receipt of each service, the oldest first; None if there is none."""
        if (services := self._services.get(request_id)) is None:
            return None
        return b"[%b]" % b",".join(self._encoded[request_id, service] for service in services)

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

    def _drop(self, key: tuple[str, str]) -> None:
        request_id, service = key
        self._num_bytes -= _count_bytes(key, self._encoded.pop(key))
        services = self._services[request_id]
        services.remove(service)
        if not services:
            del self._services[request_id]


def _count_bytes(key: tuple[str, str], encoded: bytes) -> int:
    return _ENTRY_BYTES + sum(map(len, key)) + len(encoded)
