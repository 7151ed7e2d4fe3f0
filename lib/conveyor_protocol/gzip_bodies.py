"""Decompresses request bodies with `Content-Encoding: gzip`, within limits. Used by gateway and engine. Pure."""

import zlib
from collections.abc import Iterator
from typing import Final

PIECE_BYTES: Final = 64 << 10  # of the decompressed body; a piece takes less than a millisecond
RATIO_MAX: Final = 100  # decompressed bytes for each byte that has arrived, beyond the first PIECE_BYTES
_GZIP: Final = ("gzip", "x-gzip")
_PLAIN: Final = ("", "identity")


class BadGzip(Exception):
    """The body is not one gzip member, or is compressed beyond RATIO_MAX."""


def is_gzip(content_encoding: str | None) -> bool | None:
    """Return whether a body with this header is compressed; None if its encoding is another one."""
    encoding = (content_encoding or "").strip().lower()
    return True if encoding in _GZIP else False if encoding in _PLAIN else None


class Gunzip:
    """Decompresses one body."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        self._num_arrived = self._num_written = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the data adds to the body, in pieces of at most PIECE_BYTES. Raises BadGzip."""
        self._num_arrived += len(data)
        is_full = False
        while data or is_full:
            try:
                piece = self._inflate.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise BadGzip(f"it is not gzip: {error}") from None
            data, is_full = self._inflate.unconsumed_tail, len(piece) == PIECE_BYTES
            self._num_written += len(piece)
            if self._num_written > PIECE_BYTES + RATIO_MAX * self._num_arrived:
                raise BadGzip(f"its gzip expands to more than {RATIO_MAX} times its size")
            if self._inflate.unused_data:
                raise BadGzip("other data follows its gzip")
            if piece:
                yield piece

    def end(self) -> None:
        """Raise BadGzip if the body has ended before its gzip."""
        if not self._inflate.eof:
            raise BadGzip("its gzip is cut off")
