"""Text that others wrote, before people read it: printable, and no longer than its place. Pure.

Pods, engines, model files and other tenants write parts of what stands in a status, an Event or a terminal. `clip` and
`make_printable` are the one gate for it. Log lines quote their values themselves (`conveyor_process.log`).
"""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4096  # of UTF-8
_UNPRINTABLE: Final = "\ufffd"


def make_printable(text: str) -> str:
    """`text` with spaces for other white space, and U+FFFD for every other character that `str.isprintable` refuses.

    Those are control characters, which terminals obey; marks that reorder or hide text; and lone surrogates, which the
    API server changes, so that a status would never be equal to what was written.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else _UNPRINTABLE for char in text)


def clip(message: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """`message`, printable and shortened to `max_bytes` of UTF-8."""
    encoded = make_printable(message[: max_bytes + 1]).encode()
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."
