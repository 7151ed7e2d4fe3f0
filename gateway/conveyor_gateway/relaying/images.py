"""Recognises images in JSON bodies by samples, because the gateway does not parse whole bodies. Pure.

Used by `prefixes` and `work`. ADR 162 has the reasons.
"""

import re
from typing import Final

import msgspec

_BASE64: Final = re.compile(rb"(?:[A-Za-z0-9+/]|\\[/nr]){64}")  # most texts have spaces or bytes above 127
_WHOLE: Final = re.compile(rb"[A-Za-z0-9+/=\\]+")  # a sample of it, with line breaks as JSON writes them
_DIFFERENT_MIN: Final = 16  # characters of 64: compressed pixels have about 40, and a repeated letter is a text
_QUOTE: Final = re.compile(b'"')
_SAMPLE_DIFFERENT_MIN: Final = 32
_SAMPLE_BYTES: Final = 1024
_PROBES_MAX: Final = 64
_PROBE_BYTES: Final = 4096  # between two probes, at least


def sample_image(content: msgspec.Raw, position: int) -> bytes:
    """Return bytes from all parts of the image at this position, up to its end; empty if there is none."""
    if _BASE64.match(content, position) is None:
        return b""
    end = _QUOTE.search(content, position)
    image = memoryview(content)[position : end.start() if end else None]
    sample = bytes(image[:: len(image) // _SAMPLE_BYTES + 1]) + bytes(image[-_SAMPLE_BYTES:])
    is_image = len(set(sample)) >= _SAMPLE_DIFFERENT_MIN and _WHOLE.fullmatch(sample)
    return sample if is_image else b""


def estimate_image_bytes(body: bytes) -> int:
    """Return about how many bytes of a body are images in base64. The cost does not grow with the body.

    A client can place bytes so that a text counts as an image.
    """
    distance = max(_PROBE_BYTES, len(body) // _PROBES_MAX + 1)
    found = (_BASE64.match(body, position) for position in range(distance // 2, len(body), distance))
    num_found = sum(each is not None and len(set(each[0])) >= _DIFFERENT_MIN for each in found)
    return min(len(body), distance * num_found)
