"""What the kernels know of the GPU that they run on."""

from functools import cache
from typing import Any

from triton import knobs
from triton.runtime import driver


@cache
def capability() -> int:
    """Of the part: 90 for 9.0, an H100. 0 in Triton's interpreter, which is none."""
    return 0 if knobs.runtime.interpret else int(driver.active.get_current_target().arch)


def has_warp_groups() -> bool:
    """Whether four warps multiply 64 rows together."""
    return capability() in (90, 100, 103)


def early_launch() -> dict[str, Any]:
    """Options of a launch that may begin before the kernel ahead of it has ended (programmatic dependent launch).

    A kernel with BEGINS_EARLY lets the next one begin, and waits for the one ahead, in this order. Before it waits, it
    may read only what no kernel writes, as the one ahead may itself have begun early.
    """
    return {"BEGINS_EARLY": True, "launch_pdl": True} if capability() >= 90 else {"BEGINS_EARLY": False}
