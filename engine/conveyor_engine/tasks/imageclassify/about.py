"""What all processes know of models that classify images, and how the files of one show it."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import read_architectures
from conveyor_engine.registry import About


def _recognises(directory: Path) -> bool:
    """Whether config.json names a classifier of images. Raises ModelError."""
    return any("ForImageClassification" in name for name in read_architectures(directory))


TASK: Final = About(
    does="classifies images",
    does_not="classifies no images",
    path="/v1/images/classify",
    recognises=_recognises,
    modes=("none", "static", "dynamic"),
    cost_unit="pixels",
    reads_text=False,
    reads=True,
    runs_also=(),
)
