"""Facts about the task that classifies images, for all processes, and how a model's files are recognised."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import read_architectures
from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS


def _recognises(directory: Path) -> bool:
    """Return whether config.json names an image classifier. Raises ModelError."""
    return any("ForImageClassification" in name for name in read_architectures(directory))


TASK: Final = About(
    does="classifies images",
    does_not="classifies no images",
    recognises=_recognises,
    allows=TASKS["ImageClassify"],
    cost_unit="pixels",
    reads_text=False,
    reads=True,
    runs_also=(),
)
