"""The softplus of time steps, which recurrences share."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), as exact as torch's for small results, and x above 20."""
    small = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + small  # loses small's last bits, of which the quotient has a share
    result = tl.where(whole == 1.0, small, tl.log(whole) * (small / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, result)
