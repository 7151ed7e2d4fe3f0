"""Memory for what every step reads: weights and KV caches."""

import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE = 2 * 2**20


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros, in huge pages where it fills one and the system gives them to who asks.

    Fewer pages are looked up, and processors fetch ahead within a page only. Memory that torch has had before would
    stay in the small pages it has.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < _HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape).zero_()  # here, not in the first step
