r"""Replaces lone surrogates in JSON, such as `"\ud83d"`. Pure. Gateways and engines use it if a body fails to parse.

JSON's grammar allows them, but JSON parsers do not: a text has no such character. A program that counts UTF-16 units
writes them when it cuts a text within an emoji. Agents keep this text, so that all later requests would fail.
"""

import re
from typing import Final

_MOST: Final = 10_000  # in one body; more take a gateway's event loop too long
_LONE: Final = re.compile(
    rb"\\u(?:[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)


def replace_lone_surrogates(body: bytes) -> bytes:
    """Return the body with U+FFFD in place of the first 10,000, as browsers encode them."""
    return _LONE.sub(_replace, body, _MOST)


def _replace(found: re.Match[bytes]) -> bytes:
    body, at = found.string, found.start()
    while at and body[at - 1] == ord("\\"):
        at -= 1
    is_escape = (found.start() - at) % 2 == 0  # otherwise the backslash is itself escaped
    return rb"\ufffd" if is_escape else found[0]
