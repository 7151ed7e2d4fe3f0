"""Tests when the framing of a body is checked."""

from dataclasses import dataclass
from random import Random
from typing import Any

from conveyor_http.framing import FREE_CHUNKS, MIN_CHUNK_BYTES, Framing

FRAME_BYTES = 6


@dataclass
class Body:
    """The part of a StreamReader that `Framing` reads."""

    total_bytes: int = 0


def count_checks(sizes: list[int]) -> tuple[int, int | None]:
    """Feed chunks of these sizes. Returns how many were checked, and the first after which the framing is excessive."""
    body: Any = Body()
    framing, num_checks = Framing(body), 0
    for number, size in enumerate(sizes):
        body.total_bytes += size
        if framing.feed(FRAME_BYTES + size):
            num_checks += 1
            if framing.is_excessive():
                return num_checks, number
    return num_checks, None


def test_events_of_a_stream_are_seldom_checked() -> None:
    num_checks, excessive = count_checks([MIN_CHUNK_BYTES] * 10_000)
    assert excessive is None
    assert 0 < num_checks < 500


def test_no_excess_is_missed_between_two_checks() -> None:
    random = Random(1)
    for largest in (1, 8, 100, 300, 500):
        sizes = [random.randint(1, largest) for _ in range(20_000)]
        fed = 0
        expected = None
        for number, size in enumerate(sizes):
            fed += size
            if FRAME_BYTES * (number + 1) > FRAME_BYTES * (FREE_CHUNKS + fed / MIN_CHUNK_BYTES):
                expected = number
                break
        assert count_checks(sizes)[1] == expected
