"""Loads a model's image processor with transformers. It resizes, crops and normalises images with Pillow and numpy.

The fork server loads it for the workers, which do not import torch. The runner loads it once to find the shape of
images. The files come from a tenant, so sizes are checked before they are used, and no code in them is run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import PROCESSOR_FILES, has_image_processor
from conveyor_engine.wire.images import PictureShape

SIDE_MAX: Final = 1024  # of a processed image: 4 MiB in float32 for each channel
_PROBES: Final = ((64, 64), (96, 48), (48, 96))
ERRORS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


class ImageProcessor:
    """Preprocesses images for one model."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def process(self, image: Image.Image) -> npt.NDArray[np.float32]:
        """Preprocess an RGB image. Returns (channels, height, width), contiguous."""
        made = self._processor(images=image, return_tensors=None)["pixel_values"][0]
        return np.ascontiguousarray(made, dtype=np.float32)

    def find_shape(self) -> PictureShape:
        """Return the shape of a processed square image. Raises ModelError if the processor returns anything except
        pixels."""
        return self._find_shapes()[0]

    def find_only_shape(self) -> PictureShape:
        """Return the same as `find_shape`. Also raises ModelError if the model's images do not all have one shape."""
        shape, *others = self._find_shapes()
        if any(other != shape for other in others):
            raise ModelError(f"the model's image processor makes pictures of several shapes: {[shape, *others]}")
        return shape

    def _find_shapes(self) -> list[PictureShape]:
        try:
            made = [self._processor(images=Image.new("RGB", size), return_tensors=None) for size in _PROBES]
            shapes = [PictureShape(*np.shape(each["pixel_values"][0])) for each in made]
        except ERRORS as error:
            raise ModelError(f"the model's image processor makes no pixels of a picture: {error}") from error
        if others := sorted(set(made[0]) - {"pixel_values"}):
            raise ModelError(
                f"the model's image processor makes {', '.join(others)} too, which this engine does not read"
            )
        return shapes


def load_processor(directory: Path) -> ImageProcessor:
    """Load the model's image processor. Raises ModelError."""
    if not has_image_processor(directory):
        message = (
            f"{directory} has no {PROCESSOR_FILES[0]}: save the model's image processor there (save_pretrained does)"
        )
        raise ModelError(message)
    try:
        processor = AutoImageProcessor.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, backend="pil"
        )
    except ERRORS as error:
        text = " ".join(str(error).split())[:500]
        raise ModelError(
            f"the image processor in {directory} cannot be used: {type(error).__name__}: {text}"
        ) from error
    for name, side in _sides(processor):
        if not 1 <= side <= SIDE_MAX:
            raise ModelError(f"the image processor in {directory} has {name} {side}; 1 to {SIDE_MAX} is possible")
    return ImageProcessor(processor)


def _sides(processor: Any) -> Iterator[tuple[str, int]]:
    """Yield the name and the value of each size that the processor produces."""
    for name in ("size", "crop_size", "pad_size"):
        size = getattr(processor, name, None) or {}
        for key in ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width"):
            side = size.get(key) if isinstance(size, dict) else getattr(size, key, None)
            if side is not None:
                yield f"{name}.{key}", side
