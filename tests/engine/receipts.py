"""Checks the receipt of an answer."""

import socket
from typing import Any, Final

ASKED: Final = {"X-Receipt": "true"}


def check_receipt(receipt: dict[str, Any]) -> dict[str, Any]:
    """Return the receipt after checking what all of them have in common."""
    assert receipt["engine"] == socket.gethostname()
    assert receipt["engine_ms"] > 0
    assert 0 <= receipt["padding_ms"] <= receipt["engine_ms"]
    assert min(receipt["queue_ms"], receipt["batch_wait_ms"], receipt["decode_ms"], receipt["neighbours"]) >= 0
    assert receipt["prefill_ms"] > 0
    assert not {"gateway", "gateway_queue_ms", "cached_tokens"} & set(receipt), "no gateway, and no cache_salt"
    return receipt
