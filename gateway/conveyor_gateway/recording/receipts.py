"""The receipts of the last requests, by request id. `record` adds them, and `pages.receipt` returns them."""

from typing import Final

import msgspec

from conveyor_protocol.usage import RequestReceipt

RECEIPTS_MAX: Final = 10_000
MAX_BYTES: Final = 8 << 20
_ENTRY_BYTES: Final = 250  # roughly what Python keeps for an entry besides its text


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

    def _drop(self, request_id: str) -> None:
        self._num_bytes -= _count_bytes(request_id, self._encoded.pop(request_id))


def _count_bytes(request_id: str, encoded: bytes) -> int:
    return _ENTRY_BYTES + len(request_id) + len(encoded)
