"""The headers that gateway and engine both read: a request's id, timeout, level, place, usage, receipt and the pod.

Pure.
"""

import math
import random
import re
from typing import Final, NamedTuple

REQUEST_ID_HEADER: Final = "X-Request-Id"
REQUEST_TIMEOUT_HEADER: Final = "X-Request-Timeout-Seconds"
TIMEOUT_SECONDS_MIN: Final = 0.001
# A client names the class of its request; the gateway sends that class's level.
CLASS_HEADER: Final = "X-Request-Class"
# Requests of lower levels go first, but each level counts as LEVEL_AGEING_SECONDS of waiting. So a request is overtaken
# only by requests that arrive at most LEVEL_AGEING_SECONDS x (difference of levels) + MAX_OFFSET_SECONDS after it.
LEVEL_HEADER: Final = "X-Request-Level"
LEVEL_MAX: Final = 1000
LEVEL_AGEING_SECONDS: Final = 60.0
# Within its class, a request may count as if it had arrived up to this much earlier or later than it did. This depends
# on its timeout or length.
MAX_OFFSET_SECONDS: Final = 30.0
# A place is a gateway's right to send an engine one more request. With PLACE_IF_FREE, a request takes a free place.
# With PLACE_GRANTED, it takes a place that the engine has granted in response to `GET /place`. A 429 with NO_PLACE
# means that no place is free, so the gateway must request one.
PLACE_HEADER: Final = "X-Engine-Place"
PLACE_IF_FREE: Final = "if-free"
PLACE_GRANTED: Final = "granted"
NO_PLACE: Final = "none"
# In a 404: the model that the request named and that the engine does not serve, percent-encoded.
UNKNOWN_MODEL_HEADER: Final = "X-Engine-Unknown-Model"
# In a request, the value is a key that the gateway chose. In the response, it is a report of the tokens that the
# request has used. After its last event, a stream has USAGE_MARK, which no event contains, and then the final report.
# If the client has left, the gateway gets the report with `GET /usage?key=`.
USAGE_HEADER: Final = "X-Engine-Usage"
USAGE_MARK: Final = b"\x1e"  # ASCII's record separator
# With `true`, a client requests a receipt. The gateway appends its name and how long the request waited there. Answers
# without a `usage` have the receipt in the header of this name.
RECEIPT_HEADER: Final = "X-Receipt"
# An engine that answers only gateways rejects requests without a valid token with this challenge. A gateway whose
# release knows no tokens gets a 503, with which it tries again.
CHALLENGE_HEADER: Final = "WWW-Authenticate"
ENGINE_CHALLENGE: Final = 'Bearer realm="conveyor-engine"'
# In the answer to a probe: the host name of the engine, which in a cluster is the name of its pod.
POD_HEADER: Final = "X-Engine-Pod"

_RECEIPT_REQUEST: Final = re.compile(
    r"true(?:; gateway=([\w.-]{1,253}); queue_ms=(\d{1,12}\.\d))?", re.ASCII | re.IGNORECASE
)
_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def choose_request_id(given: str) -> str:
    """Return the client's id if it can be logged and forwarded unchanged, otherwise a new one, which is no secret."""
    return given if _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


def find_host_name(pod: str) -> str:
    """Return the host name of a pod, which the kubelet cuts to the length of a DNS label."""
    return pod[:63].rstrip("-.")


class ReceiptRequest(NamedTuple):
    """A request for a receipt, with what a gateway adds to it."""

    gateway: str = ""
    queue_ms: float = 0.0


def write_receipt_request(gateway: str, queue_seconds: float) -> str:
    """Return the header's value from a gateway with this name, at which the request has waited this long."""
    return f"true; gateway={gateway}; queue_ms={1000 * queue_seconds:.1f}"


def parse_receipt_request(text: str) -> ReceiptRequest | None:
    """Parse the header's value; None if it requests no receipt."""
    match = _RECEIPT_REQUEST.fullmatch(text)
    if match is None:
        return None
    return ReceiptRequest(match[1] or "", float(match[2] or 0))


def parse_timeout_seconds(text: str) -> float:
    """Parse how long the client wants to wait, in seconds. Raises ValueError with a sentence."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not TIMEOUT_SECONDS_MIN <= seconds < math.inf:
        least = f"a number of seconds, at least {TIMEOUT_SECONDS_MIN:g}"
        raise ValueError(f"{REQUEST_TIMEOUT_HEADER} must be {least}, not {text[:100]!r}")
    return seconds


def parse_level(text: str) -> int:
    """Parse the request's level. Raises ValueError with a sentence."""
    if not re.fullmatch("[0-9]{1,4}", text) or int(text) > LEVEL_MAX:
        raise ValueError(f"{LEVEL_HEADER} must be a whole number from 0 to {LEVEL_MAX}, not {text[:100]!r}")
    return int(text)
