"""Applies top_k and top_p, which cut a row's distribution to its best tokens. The next token is drawn from these.

This is not a logit processor, because a processor would have to restore the vocabulary's order. Here the kept tokens
stay sorted, best first, and the draw uses this order. On CUDA, `kernels.cut` does the same in the vocabulary's order.
"""

from collections.abc import Iterator

import numpy as np
import torch

from conveyor_engine.execution.sampling.draw import BLOCK, Choices, Way
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.row_values import RowValues
from conveyor_engine.wire.request import SamplingParams

FEW = 32  # rows with top_k up to this number use only this many best tokens
CANDIDATES = 256  # best tokens that are searched first; the vocabulary is sorted only for rows that need more tokens
SORTED_AT_ONCE = 32  # rows; sorting needs several times the memory of its input
_ONLY_THE_BEST = 1e-6  # a top_p up to this keeps one token: among a million, the best token is at least as likely


class Cuts:
    """Stores each row's top_k (the vocabulary's size if off) and top_p (1 if off)."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._top_k = RowValues.full(max_num_seqs, vocab_size, np.int64, device)
        self._top_p = RowValues.full(max_num_seqs, 1, np.float32, device)

    def set_row(self, row: int, params: SamplingParams) -> Way:
        """Store the row's top_k and top_p. Return from which tokens the row then draws."""
        top_k = find_top_k(params, self._vocab_size)
        self._top_k[row] = top_k
        self._top_p[row] = params.top_p
        if top_k == 1 or params.top_p <= _ONLY_THE_BEST:
            return Way.GREEDY
        if top_k < self._vocab_size:
            return Way.FROM_FEW if top_k <= FEW else Way.FROM_PART
        return Way.FROM_PART if params.top_p < 1 else Way.FROM_ALL

    def keep(self, weights: torch.Tensor, token_ids: torch.Tensor, samples: Samples) -> Choices:
        """Cut the weights (entries, FEW) of the best tokens, best first, for entries with top_k <= FEW."""
        top_k, top_p = self._top_k[samples.device_rows], self._top_p[samples.device_rows]
        weights.masked_fill_(torch.arange(weights.shape[1], device=weights.device) >= top_k, 0.0)
        cumulative = weights.cumsum(-1)
        return Choices(slice(None), _cut(weights, cumulative, top_p * cumulative[:, -1:]), token_ids)

    def narrow(self, weights: torch.Tensor, samples: Samples) -> Iterator[Choices]:
        """Yield groups of entries with the tokens from which they draw. weights: (entries, vocabulary), float32.

        If an entry is in two groups, the later group counts. A row's tokens depend only on its own parameters and
        weights, not on the rest of the batch. Waits for the device if a row's top_k is off or above CANDIDATES.
        """
        top_k, top_p = self._top_k[samples.device_rows], self._top_p[samples.device_rows]
        best, enough = _among_the_best(weights, top_k, top_p)
        yield best
        if (self._top_k.host[samples.rows] > CANDIDATES).any() and not bool(enough.all()):
            for rest in torch.split((~enough).nonzero().squeeze(1), SORTED_AT_ONCE):
                yield Choices(rest, _among_all(weights[rest], top_k[rest], top_p[rest]))


def find_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return top_k; the vocabulary's size if it is off."""
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def find_few(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and indices of the FEW largest logits of each row, largest first: (rows, FEW) both.

    logits: (rows, vocabulary). The largest are all in the FEW blocks with the largest maxima, so the other blocks are
    read only once, for their maxima.
    """
    rows, vocab_size = logits.shape
    if vocab_size % BLOCK or vocab_size <= FEW * BLOCK or not logits.is_contiguous():
        return logits.topk(min(FEW, vocab_size), dim=-1)
    blocks = logits.view(rows, -1, BLOCK)
    block_ids = blocks.amax(-1).topk(FEW, dim=-1).indices
    found = blocks[torch.arange(rows, device=logits.device)[:, None], block_ids].view(rows, -1).topk(FEW, dim=-1)
    token_ids = block_ids.gather(1, found.indices // BLOCK) * BLOCK + found.indices % BLOCK
    return found.values, token_ids


def _among_the_best(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[Choices, torch.Tensor]:
    """Return the best tokens of all rows after the cuts, and whether these are enough for each row: bool (rows,).

    top_p is a share of the weight that top_k leaves. All rows use the same number of best tokens, because this number
    decides which of several equal tokens `topk` finds.
    """
    vocab_size = weights.shape[1]
    num_candidates = min(CANDIDATES, vocab_size)
    best, token_ids = weights.topk(num_candidates, dim=-1)
    best.masked_fill_(torch.arange(num_candidates, device=weights.device) >= top_k, 0.0)
    cumulative = best.cumsum(-1)
    cut_by_k = top_k <= num_candidates
    total = torch.where(cut_by_k, cumulative[:, -1:], _sum(weights))
    enough = cut_by_k | (top_k == vocab_size) & (cumulative[:, -1:] >= top_p * total)
    return Choices(slice(None), _cut(best, cumulative, top_p * total), token_ids), enough.squeeze(1)


def _cut(weights: torch.Tensor, cumulative: torch.Tensor, enough: torch.Tensor) -> torch.Tensor:
    """Return the weights, best first, with 0 in place of each weight whose predecessors already add up to `enough`
    (rows, 1)."""
    return weights.masked_fill(cumulative - weights >= enough, 0.0)


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """Return each row's sum, (rows, 1).

    Adds block by block, because torch rounds the sum of a long row differently if it is the only row.
    """
    num_blocks = weights.shape[1] // BLOCK
    whole = num_blocks * BLOCK
    sums = weights[:, :whole].view(len(weights), num_blocks, BLOCK).sum(-1)
    return torch.cat([sums, weights[:, whole:]], 1).sum(-1, keepdim=True)


def _among_all(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return the weights, set to 0 where cut. Tokens with the same weight as the last kept one are kept too."""
    descending = _sort_descending(weights)
    descending.masked_fill_(torch.arange(weights.shape[1], device=weights.device) >= top_k, 0.0)
    cumulative = descending.cumsum(-1)
    kept = cumulative - descending < top_p * cumulative[:, -1:]
    last = descending.gather(1, kept.sum(-1, keepdim=True).clamp_min(1) - 1)
    return weights.masked_fill(weights < last, 0.0)


def _sort_descending(values: torch.Tensor) -> torch.Tensor:
    if values.is_cuda:
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)  # ten times as fast as torch's on a CPU
