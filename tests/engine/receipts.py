"""Checks the receipt of an answer."""

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from uuid import uuid4

import pytest
from tests.engine.processes import EngineServer

from conveyor_protocol.request_headers import USAGE_HEADER

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


def check_sum(server: EngineServer, num_requests: int, send: Callable[[int, Mapping[str, str]], None]) -> None:
    """Check that the engine time of requests which are sent together is the busy time of the engine within 1 %.

    send: sends the request with this number and these headers, and returns when it has its whole answer.
    """
    server.wait_load(running=0, waiting=0)
    busy = server.metric("conveyor_engine_busy_seconds_total")
    keys = [f"sum-{uuid4()}" for _ in range(num_requests)]
    with ThreadPoolExecutor(num_requests) as threads:
        list(threads.map(send, range(num_requests), ({USAGE_HEADER: key} for key in keys)))
    server.wait_load(running=0, waiting=0)
    engine_ms = sum(server.get(f"/usage?key={key}").json()["receipt"][0] for key in keys)
    assert engine_ms > 0
    assert engine_ms / 1000 == pytest.approx(server.metric("conveyor_engine_busy_seconds_total") - busy, rel=0.01)
