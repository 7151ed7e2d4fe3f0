"""The trace to which the present request belongs, for the log. `log` adds its id to each line about the request.

Each server calls `enter_trace` when a request begins. Tasks that the request starts inherit the id. `spans` continues
the trace, if traces are exported.
"""

import re
from contextvars import ContextVar
from typing import Final, NamedTuple

TRACE_PARENT_HEADER: Final = "traceparent"
TRACE_STATE_HEADER: Final = "tracestate"
_TRACE_PARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)
_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


class TraceParent(NamedTuple):
    """The content of a valid header `traceparent`: its trace, the caller's span, and W3C's flags (1: sampled)."""

    trace_id: str
    span_id: str
    flags: int


def parse_trace_parent(header: str) -> TraceParent | None:
    """Parse the header `traceparent` (W3C Trace Context); None if it is invalid or empty."""
    match = _TRACE_PARENT.fullmatch(header) if header else None
    return None if match is None else TraceParent(match[1], match[2], int(match[3], 16))


def enter_trace(header: str) -> None:
    """Set the trace of the present task from the header `traceparent`; none if the header is invalid."""
    parent = parse_trace_parent(header)
    _trace_id.set("" if parent is None else parent.trace_id)


def find_trace_id() -> str:
    """Return the id of the present request's trace; "" without one."""
    return _trace_id.get()
