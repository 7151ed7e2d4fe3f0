"""Converts vectors to 8 bits in the format of `slot_cache`. For the kernels that write to the cache."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

_LEAST = tl.constexpr(1e-30)  # a divisor in place of 0


@triton.jit
def quantise(x, TYPE: tl.constexpr, LARGEST: tl.constexpr):
    """Convert x (rows, dims), float32, to numbers (rows, dims) of TYPE and scales (rows,). A vector of zeros has scale
    0."""
    scales = tl.max(tl.abs(x), axis=1)
    numbers = x * tl.div_rn(LARGEST, tl.maximum(scales, _LEAST))[:, None]
    if tl.int8 == TYPE:  # the conversion truncates
        numbers = tl.floor(numbers + 0.5)
    return numbers.to(TYPE), scales
