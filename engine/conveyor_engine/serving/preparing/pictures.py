"""Reads images in bodies, within limits on their number, memory and CPU time. Used by the tasks for images.

Runs in worker processes. For these tasks `ServedModel.reader` is the model's image processor.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from conveyor_engine.images.decoding import decode_image, read_base64
from conveyor_engine.serving.preparing.jobs import BodyKind, Lane, Prepared, ServedModel, always, name_input
from conveyor_engine.wire.worker import Job

if TYPE_CHECKING:  # the API process imports this module but not numpy
    import numpy as np
    import numpy.typing as npt

IMAGES_MAX: Final = 64  # in one body
# Limit per job. An image of PIXELS_MAX takes 270 MiB. 64 processed images take 3 x 37 MiB, because a job copies them.
_MEMORY_BYTES: Final = 512 * 2**20
_CPU_SECONDS: Final = 2.0  # per job, in addition to the limit for its bytes; an image of PIXELS_MAX takes 0.5 s


def build_kind(
    prepare: Callable[[ServedModel, Job], Prepared], prepared: Any, has_images: Callable[[bytes], bool] = always
) -> BodyKind:
    """Return a kind of body that may contain images. has_images: whether a body does."""
    return BodyKind(
        prepare,
        prepared,
        lane=Lane.FILES,
        is_costly=has_images,
        memory_bytes=_MEMORY_BYTES,
        cpu_seconds=_CPU_SECONDS,
        reading="decoded and resized",
        advice="send smaller images, or fewer",
    )


def read_files(texts: Sequence[str], param: str) -> Iterator[bytes]:
    """Yield the bytes of each base64 image in a JSON body. Raises InvalidRequest."""
    return (read_base64(text, name_input(param, index, len(texts))) for index, text in enumerate(texts))


def process_picture(model: ServedModel, data: bytes, param: str) -> "npt.NDArray[np.float32]":
    """Decode an image file and run the model's image processor on it: (channels, height, width).

    Raises InvalidRequest.
    """
    pixels: npt.NDArray[np.float32] = model.reader.process(decode_image(data, param))
    return pixels
