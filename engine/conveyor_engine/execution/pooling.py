"""Hidden states of packed sequences -> one vector each. Used by `runners.pool`."""

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.models.sentence_files import PoolingMode
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.embedding import EmbedDtype, PoolingParams

_DTYPES: Final[dict[EmbedDtype, torch.dtype]] = {
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize has it


def pool(hidden: torch.Tensor, starts: list[int], mode: PoolingMode) -> torch.Tensor:
    """hidden (T, H) of sequences that begin at starts[:-1] and end at starts[1:] -> float32 (sequences, H)."""
    bounds, device = np.array(starts), hidden.device
    if mode == "cls":
        return hidden[to_device(bounds[:-1], device)].float()
    if mode == "last":
        return hidden[to_device(bounds[1:] - 1, device)].float()
    lengths = np.diff(bounds)
    sequences = to_device(np.repeat(np.arange(len(lengths)), lengths), device)
    sums = torch.zeros((len(lengths), hidden.shape[1]), device=device).index_add_(0, sequences, hidden.float())
    return sums / to_device(lengths, device)[:, None]


def finish(vector: npt.NDArray[np.float32], asked: PoolingParams, *, normalizes: bool) -> bytes:
    """The vector as `asked`, of length 1 if `normalizes`, unless it is asked otherwise; empty if it is not finite."""
    vector = vector[: asked.dimensions]
    if not np.isfinite(vector).all():
        return b""
    if normalizes if asked.normalizes is None else asked.normalizes:
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / max(norm, _SMALLEST_NORM)).astype(np.float32)
    numbers = vector if asked.dtype == "float32" else _convert(vector, asked.dtype)
    return (numbers.byteswap() if asked.is_big_endian != (sys.byteorder == "big") else numbers).tobytes()


def _convert(vector: npt.NDArray[np.float32], dtype: EmbedDtype) -> npt.NDArray[Any]:
    """Rounded to another type, as integers with the same bytes: numpy does not have all of them."""
    kind = _DTYPES[dtype]
    same_size = torch.uint8 if kind.itemsize == 1 else torch.int16
    converted: npt.NDArray[Any] = torch.tensor(vector).to(kind).view(same_size).numpy()
    return converted
