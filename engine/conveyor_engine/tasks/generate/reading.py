"""Loads what the workers need to read images, if the model reads any."""

from pathlib import Path
from typing import Any, Final

from conveyor_engine.model_files import has_image_processor


def load_reader(directory: Path) -> Any:
    """Return the model's processor; None if it has none. Raises ModelError."""
    if not has_image_processor(directory):
        return None
    from conveyor_engine.tasks.generate.chat_pictures import load_chat_pictures  # imports transformers

    return load_chat_pictures(directory)


TASK: Final = load_reader
