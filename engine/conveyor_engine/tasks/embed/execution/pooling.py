"""Turns the hidden states of packed sequences into one vector for each sequence, and encodes vectors.

Used by `text_runner` and `image_runner`.
"""

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.runners.packed import average
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.tasks.embed.facts import (
    RESULT_MARK,
    SPARSE_NUMBERS_MAX,
    TOO_DENSE,
    EmbedDtype,
    PoolingMode,
    PoolingParams,
)

_DTYPES: Final[dict[EmbedDtype, torch.dtype]] = {
    "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
_SMALLEST_NORM = 1e-12  # as in torch.nn.functional.normalize


def pool(hidden: torch.Tensor, starts: list[int], mode: PoolingMode) -> torch.Tensor:
    """Pool hidden states (T, H) into one vector for each sequence, float32 (sequences, H).

    Sequence i has the tokens starts[i] .. starts[i + 1] - 1.
    """
    bounds, device = np.array(starts), hidden.device
    if mode == "cls":
        return hidden[to_device(bounds[:-1], device)].float()
    if mode == "last":
        return hidden[to_device(bounds[1:] - 1, device)].float()
    return average(hidden, starts)


def finish(vector: npt.NDArray[np.float32], params: PoolingParams, *, normalizes: bool) -> bytes:
    """Encode the vector as requested. Returns b"" if a number is not finite.

    `params` decides whether the vector is scaled to length 1; if it leaves this open, `normalizes` decides.
    """
    vector = vector[: params.dimensions]
    if not np.isfinite(vector).all():
        return b""
    if normalizes if params.normalizes is None else params.normalizes:
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / max(norm, _SMALLEST_NORM)).astype(np.float32)
    return _encode(vector, params)


def encode_many(numbers: npt.NDArray[np.float32], params: PoolingParams) -> bytes:
    """Encode the numbers of all tokens as requested, behind `RESULT_MARK`. Returns b"" if one is not finite."""
    return RESULT_MARK + _encode(numbers, params) if np.isfinite(numbers).all() else b""


def encode_sparse(indices: npt.NDArray[np.integer[Any]], weights: npt.NDArray[np.float32]) -> bytes:
    """Encode a sparse vector behind `RESULT_MARK`: all indices as uint32, then the weights as float32.

    Returns b"" if a weight is not finite.
    """
    if not np.isfinite(weights).all():
        return b""
    return b"".join((RESULT_MARK, indices.astype(np.uint32).data, weights.astype(np.float32, copy=False).data))


def encode_splade(found: npt.NDArray[np.int32]) -> bytes:
    """Encode what `heads.SpladeHead` makes of one text. Returns `TOO_DENSE` if it has too many numbers."""
    middle = len(found) // 2
    weights = found[middle:].view(np.float32)
    is_too_dense = middle > SPARSE_NUMBERS_MAX and np.isfinite(weights).all()
    return TOO_DENSE if is_too_dense else encode_sparse(found[:middle], weights)


def _encode(vector: npt.NDArray[np.float32], params: PoolingParams) -> bytes:
    numbers = vector if params.dtype == "float32" else _convert(vector, params.dtype)
    return (numbers.byteswap() if params.is_big_endian != (sys.byteorder == "big") else numbers).tobytes()


def _convert(vector: npt.NDArray[np.float32], dtype: EmbedDtype) -> npt.NDArray[Any]:
    """Round the vector to another type. Returns integers with the same bytes, because numpy lacks some of the types."""
    kind = _DTYPES[dtype]
    same_size = torch.uint8 if kind.itemsize == 1 else torch.int16
    converted: npt.NDArray[Any] = torch.tensor(vector).to(kind).view(same_size).numpy()
    return converted
