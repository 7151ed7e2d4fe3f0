"""Facts about the task that transcribes speech, for all processes. Recognises the model's files."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import read_architectures
from conveyor_engine.registry import About


def _recognises(directory: Path) -> bool:
    """Return whether config.json names a Whisper model. Raises ModelError."""
    return "WhisperForConditionalGeneration" in read_architectures(directory)


TASK: Final = About(
    does="transcribes speech",
    does_not="transcribes no speech",
    recognises=_recognises,
    batching_mode="continuous",
    reads=True,
    runs_also=(),
    has_objectives=False,
)
