"""Loads the model's image processor, which the workers share."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from conveyor_engine.images.processor import ImageProcessor, load_processor

TASK: Final[Callable[[Path], ImageProcessor]] = load_processor
