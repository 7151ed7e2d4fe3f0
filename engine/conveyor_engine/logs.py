"""The log's shape: one line per event, `time=... level=... event=... key=value`, on stderr.

Set up by the main of each process: `__main__`, `loop.process`.
"""

import json
import logging
import re
import sys
import time

_URL = re.compile(r"(https?://)(?:[^\s/'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", re.IGNORECASE)


class _LineFormatter(logging.Formatter):
    """Messages are written as key=value already; this adds time and level, and keeps a traceback on one line."""

    converter = staticmethod(time.gmtime)
    default_msec_format = "%s.%03dZ"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not message.startswith("event="):
            message = f"event=log logger={record.name} message={quote(without_secrets(message))}"
        line = f"time={self.formatTime(record)} level={record.levelname} {message}"
        if record.exc_info:
            line += f" traceback={quote(without_secrets(self.formatException(record.exc_info)))}"
        return line


def configure_logging() -> None:
    """For the whole process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for talkative in ("uvicorn.error", "httpx", "httpx2", "huggingface_hub"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def without_secrets(text: str) -> str:
    """Its URLs without user and password and without a query, which is the signature of a signed address."""
    return _URL.sub(r"\1\2", text)


def quote(value: object) -> str:
    """A value as it stands after `key=`: bare if it is one plain word, else a JSON string."""
    text = str(value)
    return text if text and not any(c.isspace() or c in '"=' for c in text) else json.dumps(text, ensure_ascii=False)
