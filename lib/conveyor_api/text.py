"""Makes text from other programs fit for people to read: printable, and not too long. Pure.

Pods, engines, model files and other tenants write parts of a status, an Event or a terminal's output. All of these
texts pass through `clip` or `make_printable`. Log lines quote their values themselves (`conveyor_process.log`).
"""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4096  # of UTF-8
_UNPRINTABLE: Final = "\ufffd"


def make_printable(text: str) -> str:
    """Return `text` with spaces for other white space, and U+FFFD for each other character that is not printable.

    `str.isprintable` decides. Not printable are control characters, which terminals obey, and marks that reorder or
    hide text. Lone surrogates are not printable either: the API server changes them, so a status would never equal the
    one that was written.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else " " if char.isspace() else _UNPRINTABLE for char in text)


def clip(message: str, max_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """Return `message`, printable and shortened to `max_bytes` of UTF-8."""
    encoded = make_printable(message[: max_bytes + 1]).encode()
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 3].decode(errors="ignore") + "..."
