"""The headers that gateway and engine both read: a request's id, time-out, level, place and usage. Pure."""

import math
import re
from typing import Final
from uuid import uuid4

REQUEST_ID_HEADER: Final = "X-Request-Id"
REQUEST_TIMEOUT_HEADER: Final = "X-Request-Timeout-Seconds"
TIMEOUT_SECONDS_MIN: Final = 0.001
# A client names the class of its request; the gateway sends that class's level.
CLASS_HEADER: Final = "X-Request-Class"
# Requests of lower levels go first. A level yields to each better one for so many seconds per level between them.
LEVEL_HEADER: Final = "X-Request-Level"
LEVEL_MAX: Final = 1000
LEVEL_AGEING_SECONDS: Final = 60.0
# Within its class a request counts as having come so much earlier or later, at most, by its time-out or its length.
MAX_OFFSET_SECONDS: Final = 30.0
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
    if not TIMEOUT_SECONDS_MIN <= seconds < math.inf:
        least = f"a number of seconds, at least {TIMEOUT_SECONDS_MIN:g}"
        raise ValueError(f"{REQUEST_TIMEOUT_HEADER} must be {least}, not {text[:100]!r}")
    return seconds


def parse_level(text: str) -> int:
    """The request's level. Raises ValueError with a sentence."""
    if not re.fullmatch("[0-9]{1,4}", text) or int(text) > LEVEL_MAX:
        raise ValueError(f"{LEVEL_HEADER} must be a whole number from 0 to {LEVEL_MAX}, not {text[:100]!r}")
    return int(text)
