"""The trace to which the present request belongs, for the log. `log` adds its id to each line about the request.

Each server calls `enter_trace` when a request begins. Tasks that the request starts inherit the id.
"""

import re
from contextvars import ContextVar
from typing import Final

TRACE_PARENT_HEADER: Final = "traceparent"
_TRACE_PARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


def enter_trace(header: str) -> None:
    """Set the trace of the present task from the header `traceparent` (W3C Trace Context); none if it is invalid."""
    match = _TRACE_PARENT.fullmatch(header) if header else None
    _trace_id.set(match[1] if match is not None else "")


def find_trace_id() -> str:
    """Return the id of the present request's trace; "" without one."""
    return _trace_id.get()
