"""Draws a token from each row's weights. Used by `sampler`.

A row's randomness is one uniform number, a hash of (seed, position), turned into a token by the inverse of the
cumulative distribution. So it needs no generator state: a preempted request that is computed again, or lands in
another batch, draws the same numbers.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

BLOCK = 128  # tokens; large vocabularies are searched block by block, which vectorises where torch's own does not
BELOW_ONE = 1 - 1e-6  # keeps rounding from choosing beyond the last token of the distribution


class Way(IntEnum):
    """What a row's next token is drawn from."""

    GREEDY = 0  # nothing: it is the best one
    FROM_ALL = 1
    FROM_FEW = 2  # a small top_k
    FROM_PART = 3


@dataclass(slots=True)
class Choices:
    """The tokens that some entries draw from."""

    entries: torch.Tensor | slice
    weights: torch.Tensor  # float32 (entries, n), of any sum
    token_ids: torch.Tensor | None = None  # int64 (entries, n); None: n is the vocabulary

    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        """A token for each entry, int64 (entries,), at its uniform number (entries, 1)."""
        choice = _invert(self.weights, uniforms)
        return choice if self.token_ids is None else self.token_ids.gather(1, choice[:, None]).squeeze(1)


def uniform_numbers(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): two rounds of splitmix64 (Steele et al., OOPSLA'14)."""
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seeds) + positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where in each row the cumulated weights (rows, n) pass `uniforms` (rows, 1) of their sum: int64 (rows,).

    A row with NaN gives any index, which the caller replaces.
    """
    rows, count = weights.shape
    if count % BLOCK:
        cumulative = weights.cumsum(-1)
        target = uniforms * cumulative[:, -1:] * BELOW_ONE
        return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max(count - 1)
    blocks = weights.view(rows, -1, BLOCK)
    ends = blocks.sum(-1).cumsum(-1)
    target = uniforms * ends[:, -1:] * BELOW_ONE
    block = torch.searchsorted(ends, target, right=True).clamp_max(ends.shape[1] - 1)
    begin = ends.gather(1, (block - 1).clamp_min(0)).masked_fill(block == 0, 0.0)
    inner = blocks[torch.arange(rows, device=weights.device), block.squeeze(1)].cumsum(-1)
    target = torch.minimum(target - begin, inner[:, -1:] * BELOW_ONE)  # rounding must not lead past the block's end
    index = block * BLOCK + torch.searchsorted(inner, target, right=True)
    return index.squeeze(1).clamp_max(count - 1)
