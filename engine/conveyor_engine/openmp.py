"""How threads of a step wait for each other: briefly, then asleep. Knows no torch.

OpenMP's library (libgomp, which torch brings) lets a thread that waits spin for milliseconds. Where other programs use
the CPU too, that time is theirs, and the thread that is waited for gets none. ADR 91 has the measurements.
"""

from collections.abc import Mapping
from typing import Final

SPIN_COUNT: Final = "GOMP_SPINCOUNT"
_SPINS: Final = "1000"  # a few microseconds


def spin_briefly(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that has not loaded torch yet; what it says of waiting threads stays."""
    if "OMP_WAIT_POLICY" in environment:
        return dict(environment)
    return {SPIN_COUNT: _SPINS, **environment}
