"""Makes OpenMP's threads spin only briefly when they wait for each other, and then sleep. Does not import torch.

OpenMP's library (libgomp, which is part of torch) lets a waiting thread spin for milliseconds. If other programs
share the CPUs, spinning takes CPU time from these programs and from the thread for which the others wait. The
measurements are in ADR 91.
"""

from collections.abc import Mapping
from typing import Final

SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_SPINS: Final = "1000"  # a few microseconds


def spin_briefly(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a new process that will load torch. Existing settings for waiting threads are kept."""
    if "OMP_WAIT_POLICY" in environment:
        return dict(environment)
    return {SPIN_COUNT: _SPINS, **environment}
