"""Finds when each token of a transcript is spoken, from the attention of some heads to the sound.

Used by `whisper` and `runner`. `files` chooses the heads. The method is that of transformers'
`_extract_token_timestamps`: attention weights are normalised over the tokens and smoothed by a median filter. Dynamic
time warping then assigns each token a position that is not before the position of the previous token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

_BOTH, _TOKEN, _POSITION = 0, 1, 2  # what a step of the path advances; _BOTH: the token and the position


@dataclass(frozen=True, slots=True)
class Listened:
    """A window whose tokens get times."""

    window: int  # index among the windows that are encoded in this step
    first_token: int  # index of the first token that gets a time, among the packed tokens of the step
    num_tokens: int
    num_positions: int  # number of encoder positions that contain sound; the rest is silence


class Alignment:
    """Collects, layer by layer, the attention of the chosen heads to the sound of some windows. For one step."""

    def __init__(self, heads: Mapping[int, Sequence[int]], listened: Sequence[Listened], filter_width: int) -> None:
        """heads: the chosen heads of each layer. filter_width: width of the median filter in positions, odd."""
        self._heads, self._listened, self._filter_width = heads, listened, filter_width
        self._keys: dict[int, list[torch.Tensor]] = {}
        self._weights: list[list[torch.Tensor]] = [[] for _ in listened]

    def keep(self, layer: int, keys: torch.Tensor) -> None:
        """Keep the chosen heads of the layer's cross-attention keys. keys: (windows, positions, heads, head size)."""
        if layer in self._heads:
            heads = list(self._heads[layer])
            self._keys[layer] = [keys[each.window][:, heads] for each in self._listened]

    def attend(self, layer: int, queries: torch.Tensor, scaling: float) -> None:
        """Compute the attention weights of the layer's chosen heads. queries: packed (tokens, heads, head size)."""
        if layer not in self._heads:
            return
        heads = list(self._heads[layer])
        for each, keys, weights in zip(self._listened, self._keys[layer], self._weights, strict=True):
            own = queries[each.first_token : each.first_token + each.num_tokens, heads]
            scores = torch.einsum("thd,phd->htp", own * scaling, keys)
            weights.append(scores.float().softmax(dim=-1)[..., : each.num_positions])

    def finish(self) -> list[torch.Tensor]:
        """Return how well tokens fit positions, float32 (tokens, positions), for each window."""
        found = []
        for layers in self._weights:
            weights = torch.cat(layers)
            deviation = weights.std(dim=-2, keepdim=True, unbiased=False).clamp_min(torch.finfo(torch.float32).tiny)
            weights = (weights - weights.mean(dim=-2, keepdim=True)) / deviation
            found.append(_smooth(weights, self._filter_width).mean(dim=0))
        return found


def _smooth(weights: torch.Tensor, width: int) -> torch.Tensor:
    """Replace each weight by the median of the `width` weights around it. weights: (..., positions). width: odd."""
    half = width // 2
    if weights.shape[-1] <= half:
        return weights
    padded = pad(weights, (half, half, 0, 0), mode="reflect")
    return padded.unfold(-1, width, 1).sort()[0][..., half]


def find_positions(fits: npt.NDArray[np.float32]) -> list[int]:
    """Return the position at which each token begins, by dynamic time warping over fits (tokens, positions).

    The cells of a diagonal depend only on the two diagonals before it, so all its cells are computed at once.
    """
    num_tokens, num_positions = fits.shape
    cost = np.full((num_tokens + 1, num_positions + 1), np.inf, dtype=np.float32)
    steps = np.full((num_tokens + 1, num_positions + 1), _POSITION, dtype=np.int8)
    cost[0, 0] = 0
    for diagonal in range(2, num_tokens + num_positions + 1):
        tokens = np.arange(max(1, diagonal - num_positions), min(num_tokens, diagonal - 1) + 1)
        positions = diagonal - tokens
        both, token = cost[tokens - 1, positions - 1], cost[tokens - 1, positions]
        position = cost[tokens, positions - 1]
        step = np.where((token < both) & (token < position), _TOKEN, _POSITION)
        step = np.where((both < token) & (both < position), _BOTH, step)
        before = np.choose(step, (both, token, position))
        cost[tokens, positions] = before - fits[tokens - 1, positions - 1].astype(np.float64)
        steps[tokens, positions] = step
    steps[0, :], steps[:, 0] = _POSITION, _TOKEN
    return _follow_back(steps)


def _follow_back(steps: npt.NDArray[np.int8]) -> list[int]:
    """Return the first position of each token on the path from the last cell to the first."""
    token, position = steps.shape[0] - 1, steps.shape[1] - 1
    first = [0] * token
    while token > 0 or position > 0:
        if token > 0:
            first[token - 1] = max(0, position - 1)
        step = steps[token, position]
        token -= int(step != _POSITION)
        position -= int(step != _TOKEN)
    return first
