"""Draws a token from each row's weights. Used by `sampler`.

A row's randomness is one uniform number, a hash of (seed, position). The inverse of the cumulative distribution turns
it into a token. This needs no generator state: a request draws the same numbers after a preemption or in another batch.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

BLOCK = 128  # tokens; large vocabularies are searched block by block, which is vectorised, unlike torch's search
BELOW_ONE = 1 - 1e-6  # keeps rounding from choosing beyond the last token of the distribution


class Way(IntEnum):
    """From which tokens a row draws its next token."""

    GREEDY = 0  # no draw: the best token
    FROM_ALL = 1
    FROM_FEW = 2  # the row has a small top_k
    FROM_PART = 3  # the row has a larger top_k, or top_p


@dataclass(slots=True)
class Choices:
    """The tokens from which some entries draw."""

    entries: torch.Tensor | slice
    weights: torch.Tensor  # float32 (entries, n); the sum need not be 1
    token_ids: torch.Tensor | None = None  # int64 (entries, n); None: n is the vocabulary

    def draw(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Draw a token for each entry, int64 (entries,), by its uniform number (entries, 1)."""
        choice = _invert(self.weights, uniforms)
        return choice if self.token_ids is None else self.token_ids.gather(1, choice[:, None]).squeeze(1)


def uniform_numbers(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position), by two rounds of splitmix64 (Steele et al., OOPSLA'14)."""
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seeds) + positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the index in each row where the cumulated weights (rows, n) exceed `uniforms` * sum: int64 (rows,).

    uniforms: (rows, 1). The weight at the index is never 0. For a row with NaN the index is arbitrary, and the caller
    replaces it.
    """
    rows, count = weights.shape
    if count < BLOCK:
        ends = weights.cumsum(-1)
        return _find_passed(weights, ends, uniforms * ends[:, -1:] * BELOW_ONE).squeeze(1)
    if count % BLOCK:
        weights = functional.pad(weights, (0, -count % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(-1)
    ends = sums.cumsum(-1)
    target = uniforms * ends[:, -1:] * BELOW_ONE
    block = _find_passed(sums, ends, target)
    inner = blocks[torch.arange(rows, device=weights.device), block.squeeze(1)]
    target -= (ends - sums).gather(1, block)  # what lies before the block
    return (block * BLOCK + _find_passed(inner, inner.cumsum(-1), target)).squeeze(1)


def _find_passed(weights: torch.Tensor, ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row with a weight above 0 and `ends` above the target: int64 (rows, 1).

    ends: the cumulated weights (rows, n). target: (rows, 1). If no end exceeds the target, returns the index of the
    largest end. A parallel sum rounds each end separately, so ends may fall, and may rise where a weight is 0. A
    bisection could therefore find a token with weight 0.
    """
    ends = ends.masked_fill(weights <= 0, -math.inf)
    passed = (ends > target) | (ends == ends.amax(-1, keepdim=True))
    return passed.to(torch.int8).argmax(-1, keepdim=True)  # the first of equals
