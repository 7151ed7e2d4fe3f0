"""Hidden states of packed sequences -> one vector each. Used by `runners.pool`."""

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.models.sentence_files import PoolingMode
from conveyor_engine.execution.transfer import to_device

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


def finish(vector: npt.NDArray[np.float32], dimensions: int | None, *, normalizes: bool) -> bytes:
    """The first `dimensions` (None: all) as float32 bytes, of length 1 if `normalizes`; empty if one is not finite."""
    vector = vector[:dimensions]
    if not np.isfinite(vector).all():
        return b""
    if normalizes:
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / max(norm, _SMALLEST_NORM)).astype(np.float32)
    return vector.tobytes()
