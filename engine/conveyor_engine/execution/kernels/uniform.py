"""Computes each row's uniform number on CUDA, with the hash of `sampling.draw.uniform_numbers`. Copies nothing from the
host."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

_BLOCK = 128


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["rows", "positions"])
def _hash_rows(seeds, rows, positions, uniforms, count, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = entries < count
    seed = tl.load(seeds + tl.load(rows + entries, mask=real, other=0)).to(tl.uint64, bitcast=True)
    position = tl.load(positions + entries, mask=real, other=0).to(tl.uint64, bitcast=True)
    mixed = _splitmix64(_splitmix64(seed) + position)
    uniform = (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53
    tl.store(uniforms + entries, uniform.to(tl.float32), mask=real)


@triton.jit
def _splitmix64(state):
    z = state + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


def uniform_numbers(seeds: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return uniform numbers in [0, 1), float32 (n, 1), for the given rows, int64 (n,), at positions, int64 (n,).

    seeds, int64 (max_num_seqs, 1): the seeds of all rows.
    """
    count = rows.shape[0]
    uniforms = torch.empty((count, 1), dtype=torch.float32, device=rows.device)
    _hash_rows[(triton.cdiv(count, _BLOCK),)](seeds, rows, positions, uniforms, count, BLOCK=_BLOCK)
    return uniforms
