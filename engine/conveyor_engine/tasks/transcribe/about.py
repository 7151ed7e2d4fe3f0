"""Facts about the task that transcribes speech, for all processes. Recognises the model's files."""

from pathlib import Path
from typing import Final

from conveyor_engine.model_files import read_architectures
from conveyor_engine.registry import About
from conveyor_protocol.tasks import TASKS


def _recognises(directory: Path) -> bool:
    """Return whether config.json names a Whisper model. Raises ModelError."""
    return "WhisperForConditionalGeneration" in read_architectures(directory)


TASK: Final = About(
    does="transcribes speech",
    does_not="transcribes no speech",
    recognises=_recognises,
    allows=TASKS["Transcribe"],
    reads=True,
    runs_also=(),
)
