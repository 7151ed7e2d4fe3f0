"""Finds out whether the engine rejects a model, before its weights are downloaded. Used by `fetch`."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Final

from conveyor_engine.errors import ModelError
from conveyor_process.log import quote
from conveyor_protocol.failure_reasons import FailureReason

NO_TASK: Final = "none"  # another runtime serves the model, so nothing is known about what it rejects
_PROGRAM: Final = "conveyor_engine.execution.models.preview"
_SECONDS: Final = 300.0  # the program needs 1.5 s of processor time, and a fetch may have a tenth of a core
_log = logging.getLogger(__name__)


def check_before_weights(title: str, directory: Path, task: str) -> None:
    """Raise the ModelError with which the engine would reject the model, as far as the files in `directory` show it.

    title: of the model, for messages. If the check itself fails, the model is downloaded, and the engine decides.
    """
    if task == NO_TASK:
        return
    command = [sys.executable, "-m", _PROGRAM, str(directory), task]
    try:
        said = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("event=model_not_checked model=%s error=%s", title, quote(str(error)))
        return
    if said:
        content = json.loads(said)
        message = content["message"].replace(str(directory), title)
        raise ModelError(f"{message}. Its weights were not downloaded", reason=FailureReason(content["reason"]))
