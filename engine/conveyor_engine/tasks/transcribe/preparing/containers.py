"""Recognises audio files by their first bytes, and rejects truncated WAV and OGG files. Pure.

Called by `decoding` before libsndfile reads the file. libsndfile would guess the format of any data, and would decode a
truncated file as a short one. `decoding` itself rejects truncated FLAC files.
"""

import struct
from typing import Final

from conveyor_engine.errors import InvalidRequest

_SEND: Final = "send WAV, FLAC, MP3 or OGG"
_OTHERS: Final = (  # formats that clients send but that no decoder here supports: docs/adr/0109
    (4, b"ftyp", "MP4 (m4a, mp4)"),
    (0, b"\x1a\x45\xdf\xa3", "WebM or Matroska"),
    (0, b"#!AMR", "AMR"),
    (0, b"\xff\xf1", "AAC"),
    (0, b"\xff\xf9", "AAC"),
    (0, b"0&\xb2u", "WMA"),
    (0, b"FORM", "AIFF"),
    (0, b"caff", "CAF"),
    (0, b".snd", "AU"),
)
_UNKNOWN_SIZES: Final = (0, 0x7FFFFFFF, 0xFFFFFFFF)  # written by programs that write to a pipe and do not know the size
_OGG_HEAD: Final = 27
_OGG_LAST: Final = 4  # the flag of a stream's last page


def check_container(data: bytes, param: str) -> None:
    """Raise InvalidRequest unless the bytes begin like WAV, FLAC, MP3 or OGG. A WAV or OGG file must be complete."""
    if not data:
        raise InvalidRequest(f"{param} is empty; {_SEND}", param=param)
    for start, magic, name in _OTHERS:
        if data[start : start + len(magic)] == magic:
            raise InvalidRequest(f"{param} is {name}, which this engine does not decode; {_SEND}", param=param)
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        _check_wav(data, param)
    elif data[:4] == b"OggS":
        _check_ogg(data, param)
    elif not (data[:4] == b"fLaC" or data[:3] == b"ID3" or (data[0] == 0xFF and data[1:2] >= b"\xe0")):
        raise InvalidRequest(f"{param} is not an audio file that this engine recognises; {_SEND}", param=param)


def _check_wav(data: bytes, param: str) -> None:
    """Check that the chunk with the samples is there and complete. Raises InvalidRequest."""
    start = 12
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        if name == b"data":
            found = len(data) - start - 8
            if size not in _UNKNOWN_SIZES and size > found:
                raise _cut_off(param, f"it has {found} of {size} bytes of sound")
            return
        start += 8 + size + size % 2
    raise _cut_off(param, "it has no sound")


def _check_ogg(data: bytes, param: str) -> None:
    last = data.rfind(b"OggS")
    if last + _OGG_HEAD > len(data) or not data[last + 5] & _OGG_LAST:
        raise _cut_off(param, "its last page is missing")
    body = last + _OGG_HEAD + data[last + _OGG_HEAD - 1]  # the head's last byte: how many segment sizes follow
    if body + sum(data[last + _OGG_HEAD : body]) > len(data):
        raise _cut_off(param, "its last page is cut off")


def _cut_off(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is a broken audio file: {what}", param=param)
