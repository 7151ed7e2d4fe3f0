"""Loads the model's feature extractor, which the workers share."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from conveyor_engine.tasks.transcribe.features import Extractor, load_extractor

TASK: Final[Callable[[Path], Extractor]] = load_extractor
