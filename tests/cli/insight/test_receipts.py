"""Tests the sentence about a request's time."""

import msgspec

from conveyor_insight.receipts import explain_receipt
from conveyor_protocol.usage import EngineReceipt, RequestReceipt, UsedTokens

TIMES = EngineReceipt(
    engine_ms=190.0, padding_ms=0.0, queue_ms=20.0, batch_wait_ms=0.0, prefill_ms=310.0, decode_ms=940.0,
    neighbours=22.4, preempted=0, closed_by=None,
)  # fmt: skip
RECEIPT = RequestReceipt(
    request_id="4f2a", service="team/chat", path="/v1/chat/completions", client="10.0.0.1", gateway="gateway-1",
    engine="10.1.0.7:8000", status=200, reason="-", attempts=1, ended_unix=0.0, seconds=3.42, queue_seconds=2.1,
    first_byte_seconds=2.5, engine_seconds=1.31, used=UsedTokens(512, 256, 120, receipt=TIMES),
)  # fmt: skip


def replace(
    receipt: RequestReceipt = RECEIPT, times: EngineReceipt | None = TIMES, **changes: object
) -> RequestReceipt:
    used = receipt.used and msgspec.structs.replace(receipt.used, receipt=times)
    return msgspec.structs.replace(receipt, **{"used": used} | changes)


def test_the_longest_part_comes_first() -> None:
    assert explain_receipt(RECEIPT) == (
        "team/chat answered 4f2a with 200 in 3.42 s: 2.10 s in the gateway's queue; 940 ms generating 120 tokens "
        "beside 22.4 other requests; 310 ms computing 256 of 512 prompt tokens beside 22.4 other requests; 40 ms at "
        "the engine, before and after its steps: tokenizing, writing the answer. It cost 190 ms of the engine's steps."
    )


def test_the_window_a_preemption_and_padding_are_named() -> None:
    times = msgspec.structs.replace(
        TIMES, batch_wait_ms=500.0, closed_by="window", preempted=2, padding_ms=19.0, neighbours=0.0, queue_ms=0.0
    )
    words = explain_receipt(replace(times=times, attempts=3, seconds=4.0, engine_seconds=1.85))
    assert "500 ms waiting for its batch, which the window ended" in words
    assert "generating 120 tokens with no other request in the batch, after 2 preemptions" in words
    assert "in the gateway's queue, for 3 attempts" in words
    assert words.endswith("It cost 190 ms of the engine's steps, 10% of it padding.")


def test_a_request_that_no_engine_got_has_only_the_gateway_s_time() -> None:
    receipt = msgspec.structs.replace(
        RECEIPT, status=504, reason="deadline_exceeded", engine="-", used=None, engine_seconds=0.0, queue_seconds=3.41
    )
    expected = "team/chat ended 4f2a with 504 (deadline_exceeded) in 3.42 s: 3.41 s in the gateway's queue."
    assert explain_receipt(receipt) == expected


def test_an_engine_that_reports_nothing_is_one_part() -> None:
    words = explain_receipt(replace(times=None))
    assert words.endswith("2.10 s in the gateway's queue; 1.31 s at the engine, which reports no details.")


def test_a_share_of_no_time_is_left_out() -> None:
    words = explain_receipt(replace(times=msgspec.structs.replace(TIMES, engine_ms=0.0, padding_ms=5.0)))
    assert words.endswith("It cost 0.0 ms of the engine's steps.")
