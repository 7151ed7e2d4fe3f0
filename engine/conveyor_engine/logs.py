"""Configures the log of the engine's processes, in the format of all programs (`conveyor_process.log`)."""

import os

from conveyor_process.log import LogFormat, set_up_log

LOG_FORMAT_VARIABLE = "CONVEYOR_ENGINE_LOG_FORMAT"
_QUIET = ("uvicorn.error", "httpx", "httpx2", "huggingface_hub")


def configure_logging(log_format: LogFormat | None = None) -> None:
    """Configure logging.

    If `log_format` is None, the environment sets the format. This is for code that runs before the settings are read.
    """
    if log_format is None:
        log_format = "json" if os.environ.get(LOG_FORMAT_VARIABLE) == "json" else "logfmt"
    set_up_log("INFO", log_format, _QUIET)
