"""Loads the image processor of the model, which workers share."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from conveyor_engine.images.processor import ImageProcessor, load_processor

TASK: Final[Callable[[Path], ImageProcessor]] = load_processor
