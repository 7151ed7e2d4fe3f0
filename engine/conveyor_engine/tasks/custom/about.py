"""Facts about the task that runs users' own models, for all processes, and how a model's files are recognised."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import EXPORTED_PROGRAM
from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS


def _recognises(directory: Path) -> bool:
    """Return whether there is a program but no config.json. A model of transformers may also have a program."""
    return (directory / EXPORTED_PROGRAM).is_file() and not (directory / "config.json").exists()


TASK: Final = About(
    does="computes tensors",
    does_not="computes no tensors",
    recognises=_recognises,
    allows=TASKS["Custom"],
    cost_unit="elements",
    reads_text=False,
)
