"""Encodes messages as frames on a stream socket between two processes, and reads frames.

A frame is a length (4 bytes, big-endian) and one msgpack message. After a process has ended, the other one first reads
everything that was sent and then the end of the stream. This module does not know the messages.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

_LENGTH = struct.Struct("!I")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return the bytes to send for a message."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Turns bytes, as they arrive, into whole payloads. For use in an event loop."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Return the payloads that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload


def read_payloads(stream: BinaryIO) -> Iterator[bytes]:
    """Yield payloads until the stream ends, and drop an incomplete frame at its end. Blocks. Does not copy payloads."""
    while len(head := stream.read(_LENGTH.size)) == _LENGTH.size:
        num_bytes = _LENGTH.unpack(head)[0]
        if len(payload := stream.read(num_bytes)) < num_bytes:
            return
        yield payload
