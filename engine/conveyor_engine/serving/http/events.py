"""Encodes JSON and server-sent events. Used by the formats of answers. Pure."""

import msgspec

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
encode = msgspec.json.Encoder().encode
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029")


def event(data: bytes, name: str = "") -> bytes:
    """Return JSON as one event. Unicode's line ends are escaped, because some clients split events at them."""
    if not data.isascii():
        for line_end, escaped in _LINE_ENDS:
            data = data.replace(line_end, escaped)
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"
