"""Chooses the next token of every row from its logits. Vectorised over rows; what no row asks for is skipped.

Used by `model_runner`. A row's randomness is one uniform number, a hash of (seed, position), turned into a token by the
inverse of the cumulative distribution. So it needs no generator state: a preempted request that is computed
again, or lands in another batch, draws the same numbers.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.request import SamplingParams, TokenLogprobs
from conveyor_engine.request_state import RequestState
from conveyor_engine.scheduler import Sampled

TOP_P_CANDIDATES = 1024  # top_p looks at these many tokens first, and sorts the vocabulary only if they are not enough
_BELOW_ONE = 1 - 1e-6  # keeps rounding from choosing beyond the last token of the distribution


@dataclass(slots=True)
class _Cuts:
    """Which part of the distribution each row may draw from."""

    top_k: torch.Tensor  # int64 (rows, 1), the vocabulary's size where off
    top_p: torch.Tensor  # float32 (rows, 1), 1 where off
    uncut: torch.Tensor  # bool (rows, 1), both off
    num_candidates: int  # tokens to look at first: all that any top_k asks for, and enough for most top_p


@dataclass(slots=True)
class _Parameters:
    """The sampling parameters of one set of rows, as tensors; None where no row needs it."""

    serials: list[int]
    seeds: npt.NDArray[np.uint64]
    all_greedy: bool
    greedy: torch.Tensor | None  # bool (rows,), None if no row is
    temperature: torch.Tensor  # float32 (rows, 1), 1 for greedy rows
    cuts: _Cuts | None  # None if no row has top_k or top_p
    logprob_rows: list[int]
    max_logprobs: int
    min_token_rows: list[int]


class Sampler:
    """Keeps the parameters of the last set of rows as tensors, since decoding steps mostly repeat it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: _Parameters | None = None

    def sample(self, logits: torch.Tensor, requests: list[RequestState]) -> Sampled:
        """logits (rows, vocabulary) in any float type; row i belongs to requests[i].

        Log probabilities are the model's own, before temperature, cuts and min_tokens.
        """
        if not requests:
            return Sampled([])
        parameters = self._parameters(requests, logits.shape[1])
        raw = logits
        if rows := [
            i for i in parameters.min_token_rows if requests[i].num_output_tokens < requests[i].params.min_tokens
        ]:
            logits = _forbid_stopping(logits, rows, requests)
        best, tokens = logits.max(dim=-1)
        if not parameters.all_greedy:
            drawn = _draw(logits, best, parameters, self._uniforms(parameters, requests))
            tokens = drawn if parameters.greedy is None else torch.where(parameters.greedy, tokens, drawn)
        tokens = torch.where(torch.isfinite(best), tokens, -1)
        logprobs = _logprobs(raw, tokens, parameters, requests) if parameters.logprob_rows else None
        return Sampled(tokens.tolist(), logprobs)

    def _parameters(self, requests: list[RequestState], vocab_size: int) -> _Parameters:
        serials = [request.serial for request in requests]
        if self._last is None or self._last.serials != serials:
            self._last = _build_parameters(requests, serials, vocab_size, self._device)
        return self._last

    def _uniforms(self, parameters: _Parameters, requests: list[RequestState]) -> torch.Tensor:
        positions = np.array([len(request.token_ids) for request in requests], dtype=np.uint64)
        uniforms = uniform_numbers(parameters.seeds, positions).astype(np.float32)
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


def _build_parameters(
    requests: list[RequestState], serials: list[int], vocab_size: int, device: torch.device
) -> _Parameters:
    params = [request.params for request in requests]
    greedy = [p.temperature == 0 for p in params]
    temperatures = [p.temperature or 1.0 for p in params]
    return _Parameters(
        serials=serials,
        seeds=np.array([request.seed for request in requests], dtype=np.uint64),
        all_greedy=all(greedy),
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        temperature=torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None],
        cuts=_build_cuts(params, vocab_size, device),
        logprob_rows=[i for i, p in enumerate(params) if p.logprobs is not None],
        max_logprobs=min(vocab_size, max((p.logprobs or 0 for p in params), default=0)),
        min_token_rows=[i for i, r in enumerate(requests) if r.params.min_tokens and r.stop_ids],
    )


def _build_cuts(params: list[SamplingParams], vocab_size: int, device: torch.device) -> _Cuts | None:
    random = [p.temperature > 0 for p in params]
    top_k = [p.top_k if r and 0 < p.top_k < vocab_size else vocab_size for p, r in zip(params, random, strict=True)]
    top_p = [p.top_p if r else 1.0 for p, r in zip(params, random, strict=True)]
    uncut = [k == vocab_size and p >= 1 for k, p in zip(top_k, top_p, strict=True)]
    if all(uncut):
        return None
    most = max((k for k in top_k if k < vocab_size), default=0)
    return _Cuts(
        top_k=torch.tensor(top_k, device=device)[:, None],
        top_p=torch.tensor(top_p, dtype=torch.float32, device=device)[:, None],
        uncut=torch.tensor(uncut, device=device)[:, None],
        num_candidates=min(vocab_size, max(most, TOP_P_CANDIDATES if min(top_p) < 1 else 0)),
    )


def _forbid_stopping(logits: torch.Tensor, rows: list[int], requests: list[RequestState]) -> torch.Tensor:
    """Rows that have not reached min_tokens cannot choose a token that would end them."""
    logits = logits.clone()
    for row in rows:
        logits[row, list(requests[row].stop_ids)] = float("-inf")
    return logits


def _draw(logits: torch.Tensor, best: torch.Tensor, parameters: _Parameters, uniforms: torch.Tensor) -> torch.Tensor:
    """One random token per row, int64 (rows,), by inverting the distribution at `uniforms` (rows, 1)."""
    scaled = (logits.float() - best.float()[:, None]) / parameters.temperature  # the best token is at 0
    if parameters.cuts is not None:
        scaled = scaled.masked_fill(scaled < _threshold(scaled, parameters.cuts), float("-inf"))
    cumulative = scaled.softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:] * _BELOW_ONE, right=True).squeeze(1)


def _threshold(scaled: torch.Tensor, cuts: _Cuts) -> torch.Tensor:
    """The lowest value of `scaled` (rows, vocabulary) that top_k, then top_p, leave in each row: (rows, 1).

    Tokens that tie with the last one kept are kept too. top_p is of what top_k has left.
    """
    vocab_size = scaled.shape[1]
    for count in (cuts.num_candidates, vocab_size):
        values = scaled.topk(count, dim=-1).values
        weights = values.exp().masked_fill(torch.arange(count, device=scaled.device) >= cuts.top_k, 0.0)
        cut_by_k = cuts.top_k <= count
        total = torch.where(cut_by_k, weights.sum(-1, keepdim=True), scaled.exp().sum(-1, keepdim=True))
        cumulative = weights.cumsum(-1)
        if count == vocab_size or bool((cut_by_k | cuts.uncut | (cumulative[:, -1:] >= cuts.top_p * total)).all()):
            break
    kept = (cumulative - weights < cuts.top_p * total) & (weights > 0)
    last = values.gather(1, kept.sum(-1, keepdim=True).clamp_min(1) - 1)
    return last.masked_fill(cuts.uncut, float("-inf"))


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, parameters: _Parameters, requests: list[RequestState]
) -> list[TokenLogprobs | None]:
    """Log probabilities of the chosen and of the best tokens, for the rows that asked."""
    rows = torch.tensor(parameters.logprob_rows, device=logits.device)
    chosen = tokens[rows].clamp_min(0)
    values = logits[rows].float().log_softmax(-1)
    chosen_values = values.gather(1, chosen[:, None]).squeeze(1).tolist()
    top = values.topk(parameters.max_logprobs, dim=-1)
    result: list[TokenLogprobs | None] = [None] * len(requests)
    for row, token_id, value, ids, logprobs in zip(
        parameters.logprob_rows, chosen.tolist(), chosen_values, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        count = requests[row].params.logprobs or 0
        result[row] = TokenLogprobs(token_id, value, ids[:count], logprobs[:count])
    return result
