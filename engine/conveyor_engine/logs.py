"""The log's shape: one line per event, `time=... level=... event=... key=value`, on stderr.

Set up by the main of each process: `__main__`, `engine_process`.
"""

import json
import logging
import sys
import time


class _LineFormatter(logging.Formatter):
    """Messages are written as key=value already; this adds time and level, and keeps a traceback on one line."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not message.startswith("event="):
            message = f"event=log logger={record.name} message={quote(message)}"
        line = f"time={self.formatTime(record)} level={record.levelname} {message}"
        if record.exc_info:
            line += f" traceback={quote(self.formatException(record.exc_info))}"
        return line


def configure_logging() -> None:
    """For the whole process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for talkative in ("uvicorn.error", "httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def quote(value: object) -> str:
    """A value as it stands after `key=`: bare if it is one plain word, else a JSON string."""
    text = str(value)
    return text if text and not any(c.isspace() or c in '"=' for c in text) else json.dumps(text, ensure_ascii=False)
