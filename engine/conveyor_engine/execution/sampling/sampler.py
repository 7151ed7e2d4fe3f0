"""Chooses a token for every row of logits. Vectorised over rows; operations that no row needs are skipped.

Used by the runners `generate` and `speech`: `set_row` sets how a row samples, then `sample` runs in each step of the
row. For the order of the operations see `build_processors`, then `Sampler._draw`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.sampling.cuts import SORTED_AT_ONCE, Cuts, find_few, find_top_k
from conveyor_engine.execution.sampling.draw import BELOW_ONE, BLOCK, Choices, Way, uniform_numbers
from conveyor_engine.execution.sampling.logit_processors import GREEDY_BELOW, build_processors, find_floor, mask_rows
from conveyor_engine.execution.sampling.logprobs import Logprobs, RequestedLogprobs, compute_logprobs
from conveyor_engine.execution.sampling.processor import Int64, Pipeline, Samples
from conveyor_engine.execution.sampling.row_values import RowValues
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import NOTHING_ALLOWED, RowMask, RowSampling, StepPlan

AtOnce = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], tuple[torch.Tensor, torch.Tensor]]
"""`native.sample`, or `kernels.sample.sample` on CUDA."""
Cut = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float, float], None]
"""`kernels.cut.cut`."""


def peak_bytes(max_num_seqs: int, vocab_size: int, device: torch.device) -> int:
    """Return the maximum bytes that `Sampler.sample` needs for any parameters, in addition to its logits."""
    changed = max_num_seqs * 3 * 4 * vocab_size  # float32: one copy by the processors, then two by processors or cuts
    if kernels.why_missing(device) is None:
        from conveyor_engine.execution.kernels.cut import scratch_bytes  # needs triton

        return changed + scratch_bytes(max_num_seqs)
    in_order = min(max_num_seqs, SORTED_AT_ONCE) * 11 * 4  # a copy, the sort's results and buffers, the sums
    return changed + in_order * vocab_size


@dataclass(slots=True)
class Sampled:
    """The chosen tokens, on the device."""

    token_ids: torch.Tensor  # int64 (entries,); -1 where the logits are not finite, or `NOTHING_ALLOWED`
    logprobs: Logprobs | None
    is_scored: npt.NDArray[np.bool_] | None = None  # (entries,): whether the token is the prompt's; None: all False


@dataclass(slots=True)
class Found:
    """The results of `Sampler.choose` for n entries."""

    best: torch.Tensor  # float32 (n,): the largest logit
    tokens: torch.Tensor  # int64 (n,); -1 where the logits are not finite


class Sampler:
    """Samples tokens for all rows, each with its own parameters."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, token_ids: torch.Tensor) -> None:
        """token_ids: the tokens of all rows."""
        processors = build_processors(max_num_seqs, device, token_ids)
        self._device = device
        self._of_all = Pipeline([p for p in processors if p.changes_best], max_num_seqs)
        self._of_drawing = Pipeline([p for p in processors if not p.changes_best], max_num_seqs)
        self._at_once = _find_kernel(device)  # does what the processors of `_of_drawing` do
        self._drawn_at_once = RowValues.full(max_num_seqs, 0, np.float32, device, width=2)  # temperature or 0, floor
        self._cut = _find_cut(device) if self._at_once is not None else None
        self._cut_by_kernel = RowValues.full(max_num_seqs, 0, np.float32, device, width=4)  # the same two, top_k, top_p
        self._cuts = Cuts(max_num_seqs, vocab_size, device)
        self._vocab_size = vocab_size
        self._way = np.full(max_num_seqs, Way.GREEDY, dtype=np.int8)
        self._seeds = RowValues.full(max_num_seqs, 0, np.int64, device)  # the bits of unsigned numbers
        self._wants_logprobs = np.zeros(max_num_seqs, dtype=np.bool_)
        self._requested_logprobs: dict[int, RequestedLogprobs] = {}  # by row; used only where `_wants_logprobs`
        self._token_ids = token_ids
        self._num_scored = np.zeros(max_num_seqs, dtype=np.int64)  # tokens of a prompt that get log probabilities
        self._requested_scores: dict[int, RequestedLogprobs] = {}  # by row, for tokens of the prompt

    def set_row(self, row: int, sampling: RowSampling) -> None:
        """Set how the row samples from now on."""
        params = sampling.params
        self._of_all.set_row(row, sampling)
        self._of_drawing.set_row(row, sampling)
        way = self._cuts.set_row(row, params) if params.temperature >= GREEDY_BELOW else Way.GREEDY
        self._way[row] = way
        floor, top_k = find_floor(params.min_p), find_top_k(params, self._vocab_size)
        self._drawn_at_once[row] = params.temperature if way is Way.FROM_ALL else 0, floor
        has_cuts = way in (Way.FROM_FEW, Way.FROM_PART)
        self._cut_by_kernel[row] = params.temperature if has_cuts else 0, floor, top_k, params.top_p
        self._seeds[row] = np.uint64(sampling.seed).astype(np.int64)
        self._wants_logprobs[row] = params.logprobs is not None
        self._requested_logprobs[row] = RequestedLogprobs(params.logprobs or 0, params.logprob_token_ids)
        self._num_scored[row] = 0 if params.prompt_logprobs is None else sampling.num_prompt_tokens
        self._requested_scores[row] = RequestedLogprobs(params.prompt_logprobs or 0)

    @property
    def chooses(self) -> bool:
        """Return whether `choose` can be used. It needs the kernels for CUDA."""
        return self._cut is not None

    def refresh(self) -> None:
        """Copy changed parameters to the device. Call this before replaying a graph that contains `choose`."""
        self._drawn_at_once.on_device()
        self._seeds.on_device()

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> Found:
        """Choose each row's best token, or draw one from all tokens, which is enough for most rows.

        On CUDA this needs no data from the host, so a graph can capture it.

        logits: (n, vocabulary). rows, positions: int64 (n,), where each token will be.
        """
        assert self._at_once is not None
        uniforms = self._hash_rows(rows, positions)
        best, tokens = self._at_once(logits, self._drawn_at_once[rows], uniforms, GREEDY_BELOW, BELOW_ONE)
        return Found(best, torch.where(torch.isfinite(best), tokens, -1))

    def is_enough(self, samples: Samples) -> bool:
        """Return whether these entries need nothing except the results of `choose`. It does not consider masks."""
        rows = samples.rows
        return not (
            (self._way[rows] > Way.FROM_ALL).any()
            or self._of_all.is_used(samples)
            or self._wants_logprobs[rows].any()
            or (samples.positions < self._num_scored[rows]).any()
        )

    def is_scored(self, plan: StepPlan) -> bool:
        """Return whether some row's tokens in this step end just before a prompt token that gets log probabilities."""
        rows = np.array(plan.rows, dtype=np.int64)
        ends = np.add(plan.num_computed_tokens, plan.num_tokens, dtype=np.int64)
        return bool((ends < self._num_scored[rows]).any())

    def sample(
        self, logits: torch.Tensor, samples: Samples, masks: Sequence[RowMask] = (), found: Found | None = None
    ) -> Sampled:
        """Choose a token for each entry of logits (entries, vocabulary), of any float type. Does not change the logits.

        A row with a mask gets a token that the mask allows. Log probabilities are the model's own, before masks and
        processors. An entry whose position is within the prompt gets the prompt's own token.

        found: the results of `choose` for these entries; None: not computed yet.
        """
        if not len(samples.rows):
            return Sampled(torch.zeros(0, dtype=torch.int64, device=logits.device), None)
        masked = mask_rows(logits, samples, masks) if masks else logits
        processed = self._of_all.apply(masked, samples, in_place=masked is not logits)
        ways = self._way[samples.rows]
        if self._at_once is not None:
            uniforms = self._uniforms(samples)
            if found is not None and processed is logits:
                best, tokens = found.best, found.tokens
            else:
                draws = self._drawn_at_once[samples.device_rows]
                best, tokens = self._at_once(processed, draws, uniforms, GREEDY_BELOW, BELOW_ONE)
            ways[ways == Way.FROM_ALL] = Way.GREEDY
            if self._cut is not None and ways.any():
                draws = self._cut_by_kernel[samples.device_rows]
                self._cut(processed, draws, uniforms, best, tokens, GREEDY_BELOW, BELOW_ONE)
                ways[:] = Way.GREEDY
        else:
            best, tokens = _best(processed)
        for way, entries in _group(ways):
            index, some = samples.select(entries)
            tokens[index] = self._draw(processed[index], best[index], some, way)
        tokens = torch.where(torch.isfinite(best), tokens, -1)
        if processed is not logits:
            tokens = torch.where(best == -torch.inf, NOTHING_ALLOWED, tokens)
        is_scored = samples.positions < self._num_scored[samples.rows]
        if not is_scored.any():
            return Sampled(tokens, self._logprobs(logits, tokens, samples.rows))
        index, known = samples.select(is_scored.nonzero()[0])
        tokens[index] = self._token_ids[known.device_rows, known.device_positions].long()
        return Sampled(tokens, self._logprobs(logits, tokens, samples.rows, is_scored), is_scored)

    def _draw(self, logits: torch.Tensor, best: torch.Tensor, samples: Samples, way: Way) -> torch.Tensor:
        """Draw a token for each entry, int64 (entries,): apply processors that keep the order, then cuts, then draw."""
        uniforms = self._uniforms(samples)
        if way is Way.FROM_FEW:
            values, token_ids = find_few(logits)
            return self._cuts.keep(self._weigh(values, best, samples), token_ids, samples).draw(uniforms)
        weights = self._weigh(logits, best, samples)
        if way is Way.FROM_ALL:
            return Choices(slice(None), weights).draw(uniforms)
        tokens = torch.empty_like(samples.device_rows)
        for choices in self._cuts.narrow(weights, samples):
            tokens[choices.entries] = choices.draw(uniforms[choices.entries])
        return tokens

    def _weigh(self, logits: torch.Tensor, best: torch.Tensor, samples: Samples) -> torch.Tensor:
        """Return the weights, float32, of all or some of each entry's logits. The best token's weight is 1."""
        relative = logits.float() - best.float()[:, None]
        return self._of_drawing.apply(relative, samples, in_place=True).exp_()

    def _uniforms(self, samples: Samples) -> torch.Tensor:
        """Return a uniform number for each entry, float32 (entries, 1)."""
        if self._cut is not None:
            return self._hash_rows(samples.device_rows, samples.device_positions)
        seeds = self._seeds.host[samples.rows, 0].view(np.uint64)
        uniforms = uniform_numbers(seeds, samples.positions.astype(np.uint64))
        return to_device(uniforms.astype(np.float32), self._device)[:, None]

    def _hash_rows(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        from conveyor_engine.execution.kernels import uniform  # needs triton

        return uniform.uniform_numbers(self._seeds.on_device(), rows, positions)

    def _logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int64, is_scored: npt.NDArray[np.bool_] | None = None
    ) -> Logprobs | None:
        wants = self._wants_logprobs[rows]
        entries = (wants if is_scored is None else wants | is_scored).nonzero()[0]
        if not len(entries):
            return None
        requested = {entry: self._requested_logprobs[rows[entry]] for entry in entries.tolist()}
        if is_scored is not None:
            requested |= {entry: self._requested_scores[rows[entry]] for entry in is_scored.nonzero()[0].tolist()}
        return compute_logprobs(logits, tokens, requested, with_ranks=is_scored is not None)


def _find_kernel(device: torch.device) -> AtOnce | None:
    """Return the kernel that chooses each row's best token, or draws one from all tokens; None if there is none."""
    if kernels.why_missing(device) is None:
        from conveyor_engine.execution.kernels.sample import sample  # needs triton

        return sample
    return native.sample if device.type == "cpu" and native.why_missing() is None else None


def _find_cut(device: torch.device) -> Cut | None:
    """Return the kernel that draws for rows with top_k or top_p; None on devices other than CUDA."""
    if kernels.why_missing(device) is None:
        from conveyor_engine.execution.kernels.cut import cut  # needs triton

        return cut
    return None


def _group(ways: npt.NDArray[np.int8]) -> Iterator[tuple[Way, Int64]]:
    """Yield the entries that draw at random, grouped by `Way`, so that cuts cost nothing for entries without them."""
    if ways.any():
        for way in (Way.FROM_ALL, Way.FROM_FEW, Way.FROM_PART):
            entries = (ways == way).nonzero()[0]
            if len(entries):
                yield way, entries


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return value and index of each row's largest logit. NaN counts as the largest."""
    rows, vocab_size = logits.shape
    if logits.is_cuda or vocab_size % BLOCK or not logits.is_contiguous():
        return logits.max(-1)
    blocks = logits.view(rows, -1, BLOCK)
    value, block = blocks.amax(-1).max(-1)
    return value, block * BLOCK + blocks[torch.arange(rows), block].argmax(-1)
