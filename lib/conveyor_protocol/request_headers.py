"""The headers that gateway and engine both read: a request's id, its time-out, its place and its usage. Pure."""

import math
import re
from typing import Final
from uuid import uuid4

REQUEST_ID_HEADER: Final = "X-Request-Id"
REQUEST_TIMEOUT_HEADER: Final = "X-Request-Timeout-Seconds"
# A gateway's request takes a place that is free, or one that was granted for it. A 429 that names none: ask for one.
PLACE_HEADER: Final = "X-Engine-Place"
PLACE_IF_FREE: Final = "if-free"
PLACE_GRANTED: Final = "granted"
NO_PLACE: Final = "none"
# A gateway's own key for a request; in the answer, what the request has used. Behind a stream's last event stands a
# mark, which no event contains, and the same report. `GET /usage?key=` has it for a request whose client has left.
USAGE_HEADER: Final = "X-Engine-Usage"
USAGE_MARK: Final = b"\x1e"  # ASCII's record separator
USAGE_PATH: Final = "/usage"

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def choose_request_id(given: str) -> str:
    """The client's id if it can be logged and sent on as it is, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid4().hex


def parse_timeout_seconds(text: str) -> float:
    """How long the client wants to wait. Raises ValueError with a sentence."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"{REQUEST_TIMEOUT_HEADER} must be a number of seconds above 0, not {text[:100]!r}")
    return seconds
