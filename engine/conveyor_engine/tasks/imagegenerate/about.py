"""Facts about the task that makes pictures, for all processes, and how a model's files are recognised."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import PIPELINE_INDEX
from conveyor_engine.registry import About


def _recognises(directory: Path) -> bool:
    """Return whether the directory holds a pipeline of diffusers, of whatever class."""
    return (directory / PIPELINE_INDEX).is_file()


TASK: Final = About(
    does="makes pictures",
    does_not="makes no pictures",
    path="/v1/images/generations",
    recognises=_recognises,
    batching_mode="continuous",
    cost_unit="pixels",
    reads_text=False,
    reads=True,
    runs_also=(),
    has_objectives=False,
)
