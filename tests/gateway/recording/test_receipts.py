"""Tests which receipts a gateway keeps."""

import json

from conveyor_gateway.recording.receipts import _SERVICES_MAX, MAX_BYTES, RECEIPTS_MAX, Receipts
from conveyor_protocol.usage import RequestReceipt


def make_receipt(
    request_id: str, status: int = 200, path: str = "/v1/completions", service: str = "team/qwen", seconds: float = 1.0
) -> RequestReceipt:
    return RequestReceipt(
        request_id=request_id, service=service, path=path, client="10.0.0.1", gateway="gateway-1", engine="-",
        status=status, reason="-", attempts=1, ended_unix=0.0, seconds=seconds, queue_seconds=0.5,
        first_byte_seconds=None, engine_seconds=0.5, used=None,
    )  # fmt: skip


def test_the_last_receipts_are_kept() -> None:
    receipts = Receipts(max_number=3)
    for number in range(5):
        receipts.add(make_receipt(f"r{number}"))
    assert [receipts.find(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]


def test_a_later_request_with_the_same_id_replaces_the_earlier_one() -> None:
    receipts = Receipts(max_number=2)
    for request_id, status in (("a", 200), ("b", 200), ("a", 429), ("c", 200)):
        receipts.add(make_receipt(request_id, status))
    found = receipts.find("a")
    assert found is not None
    assert [receipt["status"] for receipt in json.loads(found)] == [429]
    assert receipts.find("b") is None, "it is the oldest one now"


def test_another_service_with_the_same_id_replaces_no_receipt() -> None:
    receipts = Receipts(max_number=100)
    receipts.add(make_receipt("a"))
    for number in range(_SERVICES_MAX - 1):
        receipts.add(make_receipt("a", service=f"other/s{number}"))
    found = json.loads(receipts.find("a") or b"[]")
    assert [receipt["service"] for receipt in found[:2]] == ["team/qwen", "other/s0"]
    assert len(found) == _SERVICES_MAX
    receipts.add(make_receipt("a", service="other/one-more"))
    assert len(json.loads(receipts.find("a") or b"[]")) == _SERVICES_MAX, "the oldest one is dropped"


def test_long_receipts_are_limited_by_their_bytes() -> None:
    receipts = Receipts()
    for number in range(RECEIPTS_MAX):
        receipts.add(make_receipt(f"r{number}", path="/" + "x" * 5_000))
    kept = [found for number in range(RECEIPTS_MAX) if (found := receipts.find(f"r{number}")) is not None]
    assert 1_000 < len(kept) < 2_000
    assert sum(map(len, kept)) < MAX_BYTES
    assert receipts.find(f"r{RECEIPTS_MAX - 1}") is not None


async def test_the_slowest_requests_of_a_service_come_first() -> None:
    receipts = Receipts()
    for number in range(1_500):
        receipts.add(make_receipt(f"mine{number}", seconds=float(number * 7 % 1_500)))
        receipts.add(make_receipt(f"theirs{number}", service="team/qwen-2", seconds=9_999.0))
    page = await receipts.find_slowest("team/qwen")
    assert page.num_kept == 1_500
    assert [receipt.seconds for receipt in page.receipts] == [float(number) for number in range(1_499, 1_489, -1)]
    assert {receipt.service for receipt in page.receipts} == {"team/qwen"}
    assert (await receipts.find_slowest("other/qwen")).receipts == []
