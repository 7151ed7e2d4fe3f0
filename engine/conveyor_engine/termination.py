"""The termination message: why this process ended, for whoever reads the container's status. Called by `__main__`.

One JSON object {"reason": CamelCase, "message": sentence} in the file that the environment's TERMINATION_LOG names.
"""

import json
import logging
import os
from pathlib import Path

MESSAGE_CHARACTERS_MAX = 2000  # Kubernetes keeps 4,096 bytes
_log = logging.getLogger(__name__)


def write_termination_message(reason: str, message: str) -> None:
    """Does nothing without TERMINATION_LOG; a file that cannot be written is only logged."""
    path = os.environ.get("TERMINATION_LOG")
    if not path:
        return
    text = json.dumps({"reason": reason, "message": message[:MESSAGE_CHARACTERS_MAX]}, ensure_ascii=False)
    try:
        Path(path).write_text(text)
    except OSError as error:
        _log.warning("event=termination_message_not_written path=%s error=%s", path, error.strerror)
