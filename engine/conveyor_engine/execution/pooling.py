"""Hidden states of packed sequences -> one vector each. Used by `embedding_runner`."""

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.models.sentence_files import PoolingMode

_SMALLEST_NORM = 1e-12  # as torch.nn.functional.normalize has it


def pool(hidden: torch.Tensor, starts: list[int], mode: PoolingMode) -> torch.Tensor:
    """hidden (T, H) of sequences that begin at starts[:-1] and end at starts[1:] -> float32 (sequences, H)."""
    bounds = torch.tensor(starts, device=hidden.device)
    if mode == "cls":
        return hidden[bounds[:-1]].float()
    if mode == "last":
        return hidden[bounds[1:] - 1].float()
    lengths = bounds.diff()
    rows = torch.repeat_interleave(lengths)
    sums = torch.zeros((len(lengths), hidden.shape[1]), device=hidden.device).index_add_(0, rows, hidden.float())
    return sums / lengths[:, None]


def finish(vector: npt.NDArray[np.float32], dimensions: int | None, *, normalizes: bool) -> bytes:
    """The first `dimensions` of it, all if None, at length 1 if it `normalizes`; nothing if they are not finite."""
    vector = vector[:dimensions]
    if not np.isfinite(vector).all():
        return b""
    if normalizes:
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        vector = (vector / max(norm, _SMALLEST_NORM)).astype(np.float32)
    return vector.tobytes()
