"""Builds the exporter of traces, if the environment names a collector. Called once by each program.

OpenTelemetry's own variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) switches it on. Without
them nothing of OpenTelemetry is imported, and programs check one attribute for each request.
"""

import logging
import os
from typing import TYPE_CHECKING, Final

from conveyor_process.settings import SettingsError

if TYPE_CHECKING:
    from conveyor_process.otlp import Tracer

_log = logging.getLogger(__name__)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def build_tracer(program: str) -> "Tracer | None":
    """Return the tracer of this process; None if the environment names no collector, or the extra is not installed.

    program: `service.name` of the spans, unless OTEL_SERVICE_NAME is set. Raises SettingsError if the variables are
    invalid.
    """
    if not _is_wanted():
        return None
    try:
        from conveyor_process.otlp import Tracer
    except ImportError as error:  # a shell's variables may be meant for other programs
        _log.warning("event=no_traces missing_extra=traces error=%s", error)
        return None
    try:
        return Tracer(program)
    except ValueError as error:
        raise SettingsError(f"the variables OTEL_* are invalid: {error}") from error


def _is_wanted() -> bool:
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip()
    return not is_disabled and exporter == "otlp" and any(os.environ.get(name) for name in _ENDPOINTS)
