"""What all processes know of models that their owner brings, and how the files of one show it."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import EXPORTED_PROGRAM
from conveyor_engine.registry import About


def _recognises(directory: Path) -> bool:
    """Whether there is a program and no model of transformers, which may have one beside it."""
    return (directory / EXPORTED_PROGRAM).is_file() and not (directory / "config.json").exists()


TASK: Final = About(
    does="computes tensors",
    does_not="computes no tensors",
    path="/v2/models/{model}/infer",
    recognises=_recognises,
    cost_unit="elements",
    reads_text=False,
)
