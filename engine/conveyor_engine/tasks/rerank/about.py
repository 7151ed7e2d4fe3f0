"""Facts about the task that ranks documents, for all processes, and how a model's files are recognised."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import count_labels, read_architectures, scores_tokens
from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS


def _recognises(directory: Path) -> bool:
    """Return whether the files are those of a sequence classifier with one label, or of a model that scores tokens.

    Raises ModelError.
    """
    if scores_tokens(directory):
        return True
    is_classifier = any(name.endswith("ForSequenceClassification") for name in read_architectures(directory))
    return is_classifier and count_labels(directory) == 1


TASK: Final = About(
    does="ranks documents",
    does_not="ranks no documents",
    recognises=_recognises,
    allows=TASKS["Rerank"],
    runs_also=(),
)
