"""Facts about the task that classifies texts, for all processes, and how a model's files are recognised."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import read_architectures
from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS

_CLASSIFIES = ("ForSequenceClassification", "ForTokenClassification")


def _recognises(directory: Path) -> bool:
    """Return whether config.json names a classifier. Raises ModelError.

    The task rerank, which `registry` tries first, recognises sequence classifiers with a single label.
    """
    return any(name.endswith(_CLASSIFIES) for name in read_architectures(directory))


TASK: Final = About(
    does="classifies texts",
    does_not="classifies no texts",
    recognises=_recognises,
    allows=TASKS["Classify"],
    runs_also=("rerank",),
)
