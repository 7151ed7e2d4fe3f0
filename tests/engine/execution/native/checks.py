"""Comparisons and random inputs for the tests of the kernels."""

import itertools

import pytest
import torch

from conveyor_engine.execution import native

RUNS = [
    pytest.mark.skipif(native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}"),
    pytest.mark.usefixtures("isa"),
]
# Largest error relative to the largest value of the exact result: one rounding of the result, and float32 sums.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def assert_close(actual: torch.Tensor, exact: torch.Tensor, tolerance: float | None = None) -> None:
    """Assert that the error is small. NaN and infinity fail, because they compare false."""
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs().max() / exact.abs().max()
    assert error <= (TOLERANCE[actual.dtype] if tolerance is None else tolerance), f"relative error {error:.1e}"


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Sequences:
    """Random sequences in a shuffled paged cache. All unwritten places contain NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
        dtype: torch.dtype,
        *,
        values_are_keys: bool = False,
    ) -> None:
        """lengths: (query tokens, tokens in the cache including these) of each sequence."""
        self.lengths, self.value_dim = lengths, value_dim
        blocks = [-(-total // 16) for _, total in lengths]
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(3)).to(torch.int32)
        self.tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        kept = (0, dim) if values_are_keys else (dim, value_dim)
        self.caches = native.kv_cache(sum(blocks), kv_heads, *kept, dtype)
        for cache in self.caches:
            cache.fill_(torch.nan)
        self.keys = [random(total, kv_heads, dim, dtype=dtype, seed=i) for i, (_, total) in enumerate(lengths)]
        self.values = [
            random(k.shape[0], kv_heads, value_dim, dtype=dtype, seed=99 + i) for i, k in enumerate(self.keys)
        ]
        if values_are_keys:
            self.values = [key[..., :value_dim] for key in self.keys]
        for row, table in enumerate(order.split(blocks)):
            self.tables[row, : len(table)] = table
            positions = torch.arange(lengths[row][1])
            slots = table[positions // 16].long() * 16 + positions % 16
            native.kv_write(self.keys[row], self.values[row], slots, self.caches)
        self.starts = torch.tensor([0, *itertools.accumulate(n for n, _ in lengths)], dtype=torch.int32)
        self.totals = torch.tensor([total for _, total in lengths], dtype=torch.int32)
        self.query = random(int(self.starts[-1]), heads, dim, dtype=dtype, seed=7)

    def attend(
        self,
        window: int | None = None,
        softcap: float | None = None,
        scaling: float = 0.3,
        *,
        causal: bool = True,
        sinks: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return native.paged_attention(
            self.query, self.caches, self.starts, self.totals, self.tables,
            value_dim=self.value_dim, scaling=scaling, causal=causal, sliding_window=window, softcap=softcap,
            sinks=sinks, ends=ends,
        )  # fmt: skip

    def exact(
        self,
        window: int | None = None,
        softcap: float | None = None,
        scaling: float = 0.3,
        *,
        causal: bool = True,
        sinks: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs, first = [], 0
        for (queries, total), query, key, value in zip(
            self.lengths, self.query.split([n for n, _ in self.lengths]), self.keys, self.values, strict=True
        ):
            group = query.shape[1] // key.shape[1]
            key, value = (x.double().repeat_interleave(group, dim=1) for x in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            distance = torch.arange(total - queries, total)[:, None] - torch.arange(total)[None]
            hidden = (distance < 0) & causal | (distance.abs() >= (window or total))
            if ends is not None:
                is_after = torch.arange(total) >= ends[first : first + queries, None]
                hidden = is_after | (distance >= (window or total))
            first += queries
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, queries, 1)], -1)
            outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], value))
        return torch.cat(outputs)
