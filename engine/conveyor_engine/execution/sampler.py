"""Chooses a token for every row of logits. Vectorised over rows; what no row asks for is skipped.

Used by `model_runner`, which says how each row samples and at which position; `logprobs` makes what is told beside it.
A row's randomness is one uniform number, a hash of (seed, position), turned into a token by the inverse of the
cumulative distribution. So it needs no generator state: a preempted request that is computed again, or lands in
another batch, draws the same numbers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.logprobs import Logprobs, compute_logprobs
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.step import RowSampling

CANDIDATES = 256  # the best tokens, looked at first; the vocabulary is sorted only for rows that these do not serve
_SORTED_AT_ONCE = 32  # rows; sorting takes several times the memory of what is sorted
_GREEDY_BELOW = 1e-5  # temperature; vLLM's limit: float32 cannot divide by much less
_LEAST_TOP_P = 1e-6  # keeps the best token alone, as any smaller one does, and is not 0 in float32
_BLOCK = 128  # tokens; large vocabularies are searched block by block, which vectorises where torch's own does not
_BELOW_ONE = 1 - 1e-6  # keeps rounding from choosing beyond the last token of the distribution

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Cuts:
    """Which part of the distribution each row of a draw may draw from."""

    top_k: torch.Tensor  # int64 (rows, 1), the vocabulary's size where off
    top_p: torch.Tensor  # float32 (rows, 1), 1 where off


@dataclass(slots=True)
class _Draw:
    """Rows that choose at random in one way: all from the whole distribution, or all from a part of it."""

    indices: list[int]
    rows: torch.Tensor | slice  # the same as an index of the logits; a slice, which copies nothing, if it is all rows
    seeds: npt.NDArray[np.uint64]
    temperature: torch.Tensor  # float32 (rows, 1)
    cuts: _Cuts | None  # None: the whole distribution


@dataclass(slots=True)
class _Parameters:
    """The sampling parameters of one set of rows, as tensors. Rows in no draw are greedy."""

    rows: list[RowSampling]
    draws: list[_Draw]
    num_top_logprobs: dict[int, int]  # by row, of those that asked for log probabilities ...
    logprob_rows: torch.Tensor  # ... which are these, int64
    min_token_rows: list[int]  # those that have not reached min_tokens when `stops` was built ...
    stops: tuple[torch.Tensor, torch.Tensor] | None  # ... (row, token id) of all that would end them; None: not built


def peak_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Memory that `Sampler.sample` takes at most beside the logits it is given, at its most demanding parameters."""
    weighed = max_num_seqs * 3 * 4  # per token of the vocabulary: a copy without the stop tokens, and two in float32
    in_order = min(max_num_seqs, _SORTED_AT_ONCE) * 11 * 4  # copy, sorted with indices and the sort's own, cumulated
    return (weighed + in_order) * vocab_size


@dataclass(slots=True)
class Sampled:
    """What was chosen, still on the device."""

    token_ids: torch.Tensor  # int64 (rows,); -1 where the logits are not finite
    logprobs: Logprobs | None


class Sampler:
    """Keeps the parameters of the last set of rows as tensors, since decoding steps mostly repeat it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: _Parameters | None = None

    def sample(self, logits: torch.Tensor, rows: list[RowSampling], positions: Int64) -> Sampled:
        """logits (rows, vocabulary) in any float type; row i samples as rows[i] says, the token of positions[i].

        Log probabilities are the model's own, before temperature, cuts and min_tokens.
        """
        if not rows:
            return Sampled(torch.zeros(0, dtype=torch.int64, device=logits.device), None)
        parameters = self._parameters(rows, logits.shape[1])
        raw = logits
        if parameters.min_token_rows:
            logits = _forbid_stopping(logits, parameters, positions)
        best, tokens = _best(logits)
        for draw in parameters.draws:
            uniforms = self._uniforms(draw, positions)
            tokens[draw.rows] = _draw(logits[draw.rows], best[draw.rows], draw, uniforms)
        tokens = torch.where(torch.isfinite(best), tokens, -1)
        num_top = parameters.num_top_logprobs
        return Sampled(tokens, compute_logprobs(raw, tokens, parameters.logprob_rows, num_top) if num_top else None)

    def _parameters(self, rows: list[RowSampling], vocab_size: int) -> _Parameters:
        if self._last is None or self._last.rows != rows:
            self._last = _build_parameters(rows, vocab_size, self._device)
        return self._last

    def _uniforms(self, draw: _Draw, positions: Int64) -> torch.Tensor:
        uniforms = uniform_numbers(draw.seeds, positions[draw.indices].astype(np.uint64)).astype(np.float32)
        return torch.from_numpy(uniforms).to(self._device)[:, None]


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


def _build_parameters(rows: list[RowSampling], vocab_size: int, device: torch.device) -> _Parameters:
    uncut: list[int] = []
    cut: list[int] = []
    for index, row in enumerate(rows):
        p = row.params
        if p.temperature >= _GREEDY_BELOW:
            (cut if p.top_p < 1 or 0 < p.top_k < vocab_size else uncut).append(index)
    num_top = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    return _Parameters(
        rows=rows,
        draws=[_build_draw(rows, indices, vocab_size, device) for indices in (uncut, cut) if indices],
        num_top_logprobs=num_top,
        logprob_rows=torch.tensor(list(num_top), dtype=torch.int64, device=device),
        min_token_rows=[i for i, row in enumerate(rows) if row.stop_ids],
        stops=None,
    )


def _build_draw(rows: list[RowSampling], indices: list[int], vocab_size: int, device: torch.device) -> _Draw:
    params = [rows[index].params for index in indices]
    return _Draw(
        indices=indices,
        rows=slice(None) if len(indices) == len(rows) else torch.tensor(indices, device=device),
        seeds=np.array([rows[index].seed for index in indices], dtype=np.uint64),
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)[:, None],
        cuts=_build_cuts(params, vocab_size, device),
    )


def _build_cuts(params: list[SamplingParams], vocab_size: int, device: torch.device) -> _Cuts | None:
    """Of rows that are all cut or all uncut."""
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    top_p = [max(p.top_p, _LEAST_TOP_P) for p in params]
    if top_k[0] == vocab_size and top_p[0] >= 1:
        return None
    return _Cuts(
        top_k=torch.tensor(top_k, device=device)[:, None],
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device)[:, None],
    )


def _forbid_stopping(logits: torch.Tensor, parameters: _Parameters, positions: Int64) -> torch.Tensor:
    """Rows that have not reached min_tokens cannot choose a token that would end them. `logits` is left as it is."""
    rows = [i for i in parameters.min_token_rows if positions[i] < parameters.rows[i].min_length]
    if parameters.stops is None or rows != parameters.min_token_rows:
        stops = [(row, token_id) for row in rows for token_id in parameters.rows[row].stop_ids]
        row_of, token_ids = torch.tensor(stops, dtype=torch.int64, device=logits.device).view(-1, 2).unbind(1)
        parameters.min_token_rows, parameters.stops = rows, (row_of, token_ids)
    if not rows:
        return logits
    return logits.index_put(parameters.stops, logits.new_full((), float("-inf")))


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Value and index of each row's largest logit. NaN counts as the largest."""
    rows, vocab_size = logits.shape
    if logits.is_cuda or vocab_size % _BLOCK or not logits.is_contiguous():
        return logits.max(-1)
    blocks = logits.view(rows, -1, _BLOCK)
    value, block = blocks.amax(-1).max(-1)
    return value, block * _BLOCK + blocks[torch.arange(rows), block].argmax(-1)


def _draw(logits: torch.Tensor, best: torch.Tensor, draw: _Draw, uniforms: torch.Tensor) -> torch.Tensor:
    """One random token per row, int64 (rows,), by inverting its distribution at `uniforms` (rows, 1).

    All arguments are of the draw's rows only: logits (rows, vocabulary), best (rows,). Which way a row goes depends
    on its own parameters and logits, never on the rest of the batch.
    """
    weights = (logits.float() - best.float()[:, None]).div_(draw.temperature).exp_()  # the best token has 1
    cuts = draw.cuts
    if cuts is None:
        return _invert(weights, uniforms)
    drawn, enough = _draw_among_the_best(weights, cuts, uniforms)
    if not bool(enough.all()):
        for rest in torch.split((~enough).nonzero().squeeze(1), _SORTED_AT_ONCE):
            drawn[rest] = _draw_among_all(weights[rest], cuts.top_k[rest], cuts.top_p[rest], uniforms[rest])
    return drawn


def _draw_among_the_best(
    weights: torch.Tensor, cuts: _Cuts, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token per row, and whether the row's cuts lie within the best tokens looked at: bool (rows,).

    top_p is of what top_k has left. How many are looked at is the same for all rows: which of equal tokens `topk` finds
    depends on it.
    """
    vocab_size = weights.shape[1]
    num_candidates = min(CANDIDATES, vocab_size)
    best, token_ids = weights.topk(num_candidates, dim=-1)
    best.masked_fill_(torch.arange(num_candidates, device=weights.device) >= cuts.top_k, 0.0)
    cumulative = best.cumsum(-1)
    cut_by_k = cuts.top_k <= num_candidates
    total = torch.where(cut_by_k, cumulative[:, -1:], _sum(weights))
    enough = cut_by_k | (cuts.top_k == vocab_size) & (cumulative[:, -1:] >= cuts.top_p * total)
    kept = best.masked_fill(cumulative - best >= cuts.top_p * total, 0.0)
    choice = _invert(kept, uniforms)
    return token_ids.gather(1, choice[:, None]).squeeze(1), enough.squeeze(1)


def _sum(weights: torch.Tensor) -> torch.Tensor:
    """Each row's sum, (rows, 1). Block by block: a long row that is alone is rounded otherwise by torch."""
    num_blocks = weights.shape[1] // _BLOCK
    whole = num_blocks * _BLOCK
    sums = weights[:, :whole].view(len(weights), num_blocks, _BLOCK).sum(-1)
    return torch.cat([sums, weights[:, whole:]], 1).sum(-1, keepdim=True)


def _draw_among_all(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """A token per row. Tokens that tie with the last one that the cuts keep are kept too."""
    descending = _sort_descending(weights)
    descending.masked_fill_(torch.arange(weights.shape[1], device=weights.device) >= top_k, 0.0)
    cumulative = descending.cumsum(-1)
    kept = cumulative - descending < top_p * cumulative[:, -1:]
    last = descending.gather(1, kept.sum(-1, keepdim=True).clamp_min(1) - 1)
    return _invert(weights.masked_fill(weights < last, 0.0), uniforms)


def _sort_descending(values: torch.Tensor) -> torch.Tensor:
    if values.is_cuda:
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)  # ten times as fast as torch's on a CPU


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Where in each row the cumulated weights (rows, n) pass `uniforms` (rows, 1) of their sum: int64 (rows,).

    A row with NaN gives some index; the caller has noticed it by then.
    """
    rows, count = weights.shape
    if count % _BLOCK:
        cumulative = weights.cumsum(-1)
        target = uniforms * cumulative[:, -1:] * _BELOW_ONE
        return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_max(count - 1)
    blocks = weights.view(rows, -1, _BLOCK)
    ends = blocks.sum(-1).cumsum(-1)
    target = uniforms * ends[:, -1:] * _BELOW_ONE
    block = torch.searchsorted(ends, target, right=True).clamp_max(ends.shape[1] - 1)
    begin = ends.gather(1, (block - 1).clamp_min(0)).masked_fill(block == 0, 0.0)
    inner = blocks[torch.arange(rows, device=weights.device), block.squeeze(1)].cumsum(-1)
    target = torch.minimum(target - begin, inner[:, -1:] * _BELOW_ONE)  # rounding must not lead past the block's end
    index = block * _BLOCK + torch.searchsorted(inner, target, right=True)
    return index.squeeze(1).clamp_max(count - 1)
