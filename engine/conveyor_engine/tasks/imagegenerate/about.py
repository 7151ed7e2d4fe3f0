"""Facts about the task that generates pictures, for all processes. Recognises the model's files."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import PIPELINE_INDEX
from conveyor_engine.registry import About


def _recognises(directory: Path) -> bool:
    """Return whether the directory has a diffusers pipeline of any class."""
    return (directory / PIPELINE_INDEX).is_file()


TASK: Final = About(
    does="makes pictures",
    does_not="makes no pictures",
    recognises=_recognises,
    batching_mode="continuous",
    cost_unit="pixels",
    reads_text=False,
    reads=True,
    runs_also=(),
    has_objectives=False,
)
