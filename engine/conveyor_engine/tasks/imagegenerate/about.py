"""Facts about the task that generates pictures, for all processes. Recognises the model's files."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import PIPELINE_INDEX
from conveyor_engine.registry import About
from conveyor_engine.tasks.imagegenerate.layouts import read_layout
from conveyor_protocol.tasks import TASKS


def _recognises(directory: Path) -> bool:
    """Return whether the directory has a diffusers pipeline of any class."""
    return (directory / PIPELINE_INDEX).is_file()


TASK: Final = About(
    does="makes pictures",
    does_not="makes no pictures",
    recognises=_recognises,
    allows=TASKS["ImageGenerate"],
    cost_unit="pixels",
    reads_text=False,
    reads=True,
    runs_also=(),
    check=read_layout,
)
