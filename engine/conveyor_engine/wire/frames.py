"""How messages lie on a stream socket between two processes: each in a frame.

A frame is a length (4 bytes, big-endian) and one msgpack message. When a process is gone, the other reads the end of
the stream after everything that was still sent. Knows no message.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """The bytes to send."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Bytes in as they come, whole payloads out. For an event loop."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload


def read_payloads(stream: BinaryIO) -> Iterator[bytes]:
    """The payloads until the stream ends; a frame that its end cuts off is dropped. Blocks, and copies no payload."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        num_bytes = _LENGTH.unpack(head)[0]
        if len(payload := stream.read(num_bytes)) < num_bytes:
            return
        yield payload
