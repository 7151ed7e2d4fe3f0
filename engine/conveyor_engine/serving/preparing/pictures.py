"""Pictures in bodies: how many, how they are written, and what reading them may cost. Used by the tasks for images.

Runs in worker processes, whose `ServedModel.reader` is the model's image processor then.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from conveyor_engine.images.decoding import decode_image, read_base64
from conveyor_engine.serving.preparing.jobs import Kind, Prepared, ServedModel, name_input
from conveyor_engine.wire.worker import Job

if TYPE_CHECKING:  # the API process imports this module, and has no numpy
    import numpy as np
    import numpy.typing as npt

IMAGES_MAX: Final = 64  # of one body
_MEMORY_BYTES: Final = 512 * 2**20  # of a job: a picture of PIXELS_MAX takes 270 MiB, 64 processed ones 37 MiB thrice
_CPU_SECONDS: Final = 2.0  # of a job, beside those of its bytes: a picture of PIXELS_MAX takes 0.5


def build_kind(prepare: Callable[[ServedModel, Job], Prepared], prepared: Any) -> Kind:
    """A kind of body that may have pictures."""
    return Kind(
        prepare,
        prepared,
        memory_bytes=_MEMORY_BYTES,
        cpu_seconds=_CPU_SECONDS,
        reading="decoded and resized",
        advice="send smaller images, or fewer",
    )


def read_files(texts: Sequence[str], param: str) -> Iterator[bytes]:
    """The bytes of pictures in a JSON body, one after the other. Raises InvalidRequest."""
    return (read_base64(text, name_input(param, index, len(texts))) for index, text in enumerate(texts))


def process_picture(model: ServedModel, data: bytes, param: str) -> "npt.NDArray[np.float32]":
    """What the model's image processor makes of a file: (channels, height, width). Raises InvalidRequest."""
    pixels: npt.NDArray[np.float32] = model.reader.process(decode_image(data, param))
    return pixels
