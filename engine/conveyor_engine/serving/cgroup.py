"""Counts the container's OOM kills. Used by `engine_process` to explain a killed process.

With cgroup v2 Kubernetes has the whole container killed; with v1 the kernel kills one process of it, the largest.
"""

from pathlib import Path
from typing import Final

OOM_KILLED: Final = (
    "the engine process used more than the container's memory limit and was killed by the kernel; "
    "raise resources.limits.memory, or ask for less with `max_model_len` or `num_kv_blocks`"
)

# A container's own counters, v2 and v1.
_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/sys/fs/cgroup/memory/memory.oom_control"))


def count_oom_kills(counters: tuple[Path, ...] = _COUNTERS) -> int:
    """Processes of this container that the kernel has killed for lack of memory; 0 where it does not count them."""
    for file in counters:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0
