"""Tests bodies in gzip: whatever their pieces, the result is exact or the limits hold."""

import gzip
import zlib

import pytest

from conveyor_protocol.gzip_bodies import PIECE_BYTES, RATIO_MAX, BadGzip, Gunzip, is_gzip

EMPTY = gzip.compress(b"{}", mtime=0)
TEXT = b"".join(b"%d %d," % (number, number * number) for number in range(30_000))


def unpack(data: bytes) -> bytes:
    gunzip = Gunzip()
    pieces = list(gunzip.feed(data))
    gunzip.end()
    return b"".join(pieces)


@pytest.mark.parametrize("body", [b"", b"{}", b"0123456789" * 50, TEXT])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_the_pieces_of_a_body_give_it_again(body: bytes, size: int) -> None:
    packed, gunzip = gzip.compress(body), Gunzip()
    pieces = [piece for start in range(0, len(packed), size) for piece in gunzip.feed(packed[start : start + size])]
    gunzip.end()
    assert b"".join(pieces) == body
    assert max(map(len, pieces), default=0) <= PIECE_BYTES


def test_a_bomb_ends_before_it_expands() -> None:
    bomb = gzip.compress(b" " * (50 << 20))
    received: list[int] = []
    with pytest.raises(BadGzip, match="more than 100 times"):
        received.extend(map(len, Gunzip().feed(bomb)))
    assert sum(received) <= RATIO_MAX * len(bomb) + PIECE_BYTES


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{}", "it is not gzip"),
        (EMPTY[:-9], "cut off"),
        (EMPTY + b"x", "other data follows"),
        (EMPTY * 2, "other data follows"),
        (EMPTY[:-8] + bytes(8), "it is not gzip"),
        (zlib.compress(b"{}"), "it is not gzip"),
        (b"", "cut off"),
    ],
)
def test_what_is_not_one_gzip_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(BadGzip, match=words):
        unpack(data)


def test_only_gzip_is_known() -> None:
    assert [is_gzip(each) for each in (None, "", "identity", "GZIP", "x-gzip", "br", "gzip, gzip")] == [
        False, False, False, True, True, None, None,
    ]  # fmt: skip
