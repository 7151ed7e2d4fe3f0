"""Vectors into 8 bits, as `slot_cache` keeps them. For the kernels that write to the cache."""

# Triton compiles the kernels from their source: annotations mean other things to it.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

_LEAST = tl.constexpr(1e-30)  # a divisor in place of 0


@triton.jit
def quantise(x, TYPE: tl.constexpr, LARGEST: tl.constexpr):
    """x (rows, dims) float32 -> (numbers (rows, dims) of TYPE, scales (rows,)). A vector of zeros has scale 0."""
    scales = tl.max(tl.abs(x), axis=1)
    numbers = x * tl.div_rn(LARGEST, tl.maximum(scales, _LEAST))[:, None]
    if tl.int8 == TYPE:  # the conversion cuts off
        numbers = tl.floor(numbers + 0.5)
    return numbers.to(TYPE), scales
