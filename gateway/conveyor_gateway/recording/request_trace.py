"""The span of one request at the gateway, with a part for each of its phases. Only if traces are exported.

`record` calls it when a phase begins: read (its body), queue, dispatch (to an engine) and stream (its answer). The
engine adds its own span below this one.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from multidict import CIMultiDict

from conveyor_process.tracing import TRACE_PARENT_HEADER, TRACE_STATE_HEADER

if TYPE_CHECKING:
    from conveyor_process.otlp import OpenSpan


class RequestTrace:
    """Times are those of `time.monotonic`."""

    __slots__ = ("_attributes", "_phase", "_since", "_span")

    def __init__(self, span: "OpenSpan", began: float) -> None:
        self._span = span
        self._phase, self._since = "read", began
        self._attributes: Mapping[str, str] | None = None

    @property
    def header(self) -> str:
        return self._span.header

    @property
    def is_recording(self) -> bool:
        """Whether the span is exported at its end."""
        return self._span.is_recording

    def write_headers(self, headers: CIMultiDict[str]) -> None:
        """Let the engine continue the trace below this span, or leave it out as well if it is not sampled."""
        headers[TRACE_PARENT_HEADER] = self._span.header
        if not self._span.has_parent:
            headers.popall(TRACE_STATE_HEADER, None)  # it belongs to no valid trace

    def enter(self, phase: str, now: float, attributes: Mapping[str, str] | None = None) -> None:
        """End the present phase, and begin the next one with these attributes."""
        self._span.add_part(self._phase, self._since, now, self._attributes)
        self._phase, self._since, self._attributes = phase, now, attributes

    def note(self, event: str, now: float, attributes: Mapping[str, str] | None = None) -> None:
        self._span.add_event(event, now, attributes)

    def end(self, ended: float, attributes: Mapping[str, str | int | float], error: str) -> None:
        """End the last phase and the span. error: the kind of failure, unless it is the client's; empty: none."""
        self._span.add_part(self._phase, self._since, ended, self._attributes)
        self._span.end(ended, attributes, error)
