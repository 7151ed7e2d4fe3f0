"""Loads the image processor of a model that also embeds images. The workers share the processor."""

from pathlib import Path
from typing import Any

from conveyor_engine.model_files import has_vision


def load_reader(directory: Path) -> Any:
    """Load the image processor; None if the model embeds only texts. Raises ModelError."""
    if not has_vision(directory):
        return None
    from conveyor_engine.images.processor import load_processor  # imports transformers

    return load_processor(directory)


TASK = load_reader
