"""Limits what the framing of HTTP/1.1 bodies may cost, and rejects framing whose meaning depends on the next hop.

Used by `connection` for requests, and by the gateway for engines' answers. A parser handles each chunk of a body
separately. So bodies in tiny chunks cost a hundred times as much for each byte as others (docs/adr/0125).
"""

from typing import Final

from aiohttp import StreamReader
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError

MIN_CHUNK_BYTES: Final = 192  # average of a body's chunks
FREE_CHUNKS: Final = 1024  # chunks that may be smaller
_FRAME_BYTES: Final = 6  # of a chunk with less than 256 bytes: its size in two digits, and two line ends


class Framing:
    """The framing of one chunked body: the bytes that were parsed and are not content."""

    def __init__(self, body: StreamReader) -> None:
        """Later bytes count. Bytes that were parsed before, with the head, do not."""
        self.body = body
        self._begun_bytes = body.total_bytes
        self._fed_bytes = 0
        self._safe_bytes = _FRAME_BYTES * FREE_CHUNKS  # no framing of so many bytes is excessive

    def feed(self, num_bytes: int) -> bool:
        """Count bytes that were given to the parser. Returns whether the framing may be excessive."""
        self._fed_bytes += num_bytes
        return self._fed_bytes > self._safe_bytes

    def is_excessive(self, free_chunks: int = FREE_CHUNKS) -> bool:
        """Return whether it exceeds that of `free_chunks` chunks and otherwise chunks of MIN_CHUNK_BYTES.

        Call it only when everything that was fed is parsed, and `free_chunks` has not fallen.
        """
        num_bytes = self.body.total_bytes - self._begun_bytes
        allowed_bytes = _FRAME_BYTES * (free_chunks + num_bytes / MIN_CHUNK_BYTES)
        self._safe_bytes = num_bytes + int(allowed_bytes)  # even if all further bytes are framing
        return self._fed_bytes - num_bytes > allowed_bytes


class UnknownCoding(HttpProcessingError):
    """The request has a Transfer-Encoding that this server does not decode (501; RFC 9112, section 6.1)."""

    code = 501


def find_coding_error(message: RawRequestMessage) -> HttpProcessingError | None:
    """Return the error of a request whose Transfer-Encoding is not just `chunked`, in HTTP/1.1; None without one."""
    codings = message.headers.getall("Transfer-Encoding", ())
    if not codings:
        return None
    if message.version < HttpVersion11:
        return BadHttpMessage("HTTP/1.0 has no Transfer-Encoding; use Content-Length, or HTTP/1.1")
    coding = ",".join(codings).strip()
    if coding.lower() == "chunked":
        return None
    return UnknownCoding(message=f"Transfer-Encoding {coding[:100]!r} is not supported; use only chunked")
