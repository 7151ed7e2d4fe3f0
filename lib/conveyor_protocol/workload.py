"""The lengths of a service's requests, and the sizes that follow from them. Pure.

The engine uses the sizes when it starts, and the operator shows them in `status.effective`. Both compute them here.
Lengths are assumed to be lognormal, as in `kubectl conveyor tune` (docs/adr/0090-sizes-follow-the-workload.md).
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

_P95: Final = 1.6449  # P95 of a normal distribution, in standard deviations
_LONGEST: Final = 3.719  # P99.99, likewise
_MAX_TOKENS: Final = 16_777_216


class Lengths(NamedTuple):
    """Median and 95th percentile, in tokens."""

    p50: int
    p95: int

    @property
    def mean(self) -> float:
        """The mean, but at most the P95, which the mean of a very wide distribution would exceed."""
        return min(self.p95, self.p50 * math.exp(self._sigma**2 / 2))

    @property
    def longest(self) -> int:
        """The length that 1 of 10,000 requests exceeds."""
        return math.ceil(min(_MAX_TOKENS, self.p50 * math.exp(min(_LONGEST * self._sigma, 20))))

    @property
    def _sigma(self) -> float:
        return math.log(self.p95 / self.p50) / _P95


@dataclass(frozen=True, slots=True)
class Workload:
    """The lengths of prompts and answers. `outputs`: None for tasks that take one step."""

    inputs: Lengths
    outputs: Lengths | None = None

    @property
    def mean_tokens(self) -> int:
        """Mean tokens of a request: prompt and answer."""
        return max(1, round(self.inputs.mean + (0 if self.outputs is None else self.outputs.mean)))

    @property
    def short_tokens(self) -> int:
        """Tokens of a request whose prompt and answer have the P50 length."""
        return self.inputs.p50 + (0 if self.outputs is None else self.outputs.p50)

    @property
    def long_tokens(self) -> int:
        """Tokens of a request whose prompt and answer have the P95 length."""
        return self.inputs.p95 + (0 if self.outputs is None else self.outputs.p95)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest request, rounded up to a power of two."""
        longest = self.inputs.longest + (0 if self.outputs is None else self.outputs.longest)
        return int(min(_MAX_TOKENS, 2 ** math.ceil(math.log2(max(2, longest)))))

    def choose_context(self, model_limit: int | None, capacity_tokens: int | None) -> int:
        """Return the context in tokens: the longest request, limited by the model and by a fixed KV cache."""
        bounds = (self.longest_tokens, model_limit, capacity_tokens)
        return min(bound for bound in bounds if bound is not None)

    def count_blocks(self, max_num_seqs: int, block_size: int, max_model_len: int) -> int:
        """Return the KV blocks for a full batch of P95 requests, or for one full-context request if it needs more."""
        return max(max_num_seqs * -(-self.long_tokens // block_size), -(-max_model_len // block_size))

    def count_held(self, capacity_tokens: int) -> int:
        """Return how many requests of mean length a KV cache of this capacity holds, at least 1."""
        return max(1, capacity_tokens // self.mean_tokens)

    def find_largest_graph(self, max_num_seqs: int, capacity_tokens: int | None) -> int:
        """Return the rows of the largest CUDA graph; 0 without decodes.

        This is the number of P50 requests that the KV cache holds, at most `max_num_seqs`.
        """
        if self.outputs is None or self.outputs.p95 == 1:
            return 0
        return min(max_num_seqs, max(1, (capacity_tokens or _MAX_TOKENS * max_num_seqs) // self.short_tokens))

    def list_warm_up(self, max_num_seqs: int, max_num_batched_tokens: int) -> list[tuple[int, int]]:
        """Return the prompts for the warm-up as (number, tokens) pairs: a step of usual prompts, and a long prompt."""
        together = max(1, min(max_num_seqs, max_num_batched_tokens // self.inputs.p50))
        return [(together, self.inputs.p50), (1, self.inputs.p95)]
