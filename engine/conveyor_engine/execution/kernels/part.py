"""Facts about the GPU on which the kernels run."""

from functools import cache
from typing import Any

from triton import knobs
from triton.runtime import driver


@cache
def capability() -> int:
    """Return the compute capability: 90 for 9.0, an H100. Returns 0 in Triton's interpreter, which has no GPU."""
    return 0 if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


def has_warp_groups() -> bool:
    """Return whether four warps multiply 64 rows together on this GPU."""
    return capability() in (90, 100, 103)


def early_launch() -> dict[str, Any]:
    """Return the options of a launch that may begin before the previous kernel has ended (programmatic dependent
    launch).

    A kernel with BEGINS_EARLY first lets the next kernel begin, then waits for the previous one. Before it waits, it
    may read only memory that no kernel writes, because the previous kernel may have begun early too.
    """
    return {"BEGINS_EARLY": True, "launch_pdl": True} if capability() >= 90 else {"BEGINS_EARLY": False}
