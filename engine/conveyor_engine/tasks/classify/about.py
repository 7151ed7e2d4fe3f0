"""What all processes know of models that classify, and how the files of one show it."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import read_architectures
from conveyor_engine.registry import About

_CLASSIFIES = ("ForSequenceClassification", "ForTokenClassification")


def _recognises(directory: Path) -> bool:
    """Whether config.json names a classifier; one of sequences with one label ranks. Raises ModelError."""
    return any(name.endswith(_CLASSIFIES) for name in read_architectures(directory))


TASK: Final = About(
    does="classifies texts",
    does_not="classifies no texts",
    path="/classify",
    recognises=_recognises,
    runs_also=("rerank",),
)
