"""Facts about the task that embeds, for all processes, and how a model's files are recognised."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import SENTENCE_MODULES, read_architectures
from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS

_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_ENCODES = ("Model", "ForMaskedLM", "ColBERT")


def _recognises(directory: Path) -> bool:
    """Return whether there are sentence-transformers' files, or config.json names only encoders. Raises ModelError."""
    if (directory / SENTENCE_MODULES).is_file():
        return True
    names = read_architectures(directory)
    return bool(names) and all(name.endswith(_ENCODES) and not name.endswith(_GENERATES) for name in names)


TASK: Final = About(
    does="makes embeddings",
    does_not="makes no embeddings",
    recognises=_recognises,
    allows=TASKS["Embed"],
    reads=True,
    runs_also=("generate",),
    describes=True,
)
