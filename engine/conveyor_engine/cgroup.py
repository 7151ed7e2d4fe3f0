"""Reads the container's limits on CPUs and memory, and its number of OOM kills, from cgroup v2 or v1.

`execution` plans with these limits instead of the host's. `serving.engine_process` and `execution.ranks` use the number
of OOM kills to explain why a process ended. Does not import torch.
"""

import os
import signal
from pathlib import Path
from typing import Final

from conveyor_protocol.failure_reasons import FailureReason

OOM_KILLED: Final = (
    "the engine process used more than the container's memory limit and was killed by the kernel; "
    "raise resources.limits.memory, or lower `max_model_len` or `num_kv_blocks`"
)
_CGROUP = Path("/sys/fs/cgroup")
_OOM_COUNTERS = ("memory.events", "memory/memory.oom_control")
# For each version of cgroup: the files with the memory limit, the usage and the statistics. The last entry is the name
# of the statistic for the file cache, which the kernel can reclaim.
_MEMORY = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def num_cpus() -> int:
    """Return the number of CPUs in this process's affinity, but at most the container's limit, rounded up."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read_words(_CGROUP / "cpu.max")
    if not quota:
        quota = [
            *_read_words(_CGROUP / "cpu/cpu.cfs_quota_us"),
            *_read_words(_CGROUP / "cpu/cpu.cfs_period_us"),
        ]
    if len(quota) == 2 and quota[0] not in ("max", "-1"):
        return max(1, min(available, -(-int(quota[0]) // int(quota[1]))))
    return available


def free_memory_bytes() -> int:
    """Return the machine's free memory, but at most what the container's limit leaves."""
    free = _meminfo_available_bytes()
    for limit, usage, stat, cache in _MEMORY:
        words = _read_words(_CGROUP / limit) + _read_words(_CGROUP / usage)
        if len(words) == 2 and words[0] != "max":
            free = min(free, int(words[0]) - int(words[1]) + _find_number(_CGROUP / stat, cache))
    return max(0, free)


def count_oom_kills() -> int:
    """Return how many processes of this container the kernel has killed for lack of memory; 0 if there is no counter.

    With cgroup v2, Kubernetes lets the kernel kill the whole container. With v1, the kernel kills the largest process.
    """
    return next((_find_number(_CGROUP / file, "oom_kill") for file in _OOM_COUNTERS if (_CGROUP / file).exists()), 0)


def explain_exit(process: str, exit_code: int, oom_kills_before: int) -> tuple[FailureReason, str]:
    """Return why a child process ended without a message. `exit_code`: as in `subprocess`, negative for a signal."""
    if exit_code >= 0:
        return FailureReason.ENGINE_ERROR, f"{process} exited with code {exit_code}"
    if exit_code == -signal.SIGKILL and count_oom_kills() > oom_kills_before:
        return FailureReason.OOM_KILLED, OOM_KILLED
    names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
    return FailureReason.ENGINE_ERROR, f"{process} was ended by {names.get(-exit_code, f'signal {-exit_code}')}"


def _find_number(path: Path, name: str) -> int:
    """Return the number after a name in a file of names and numbers; 0 if the name is missing."""
    words = _read_words(path)
    return int(words[words.index(name) + 1]) if name in words else 0


def _meminfo_available_bytes() -> int:
    words = _read_words(Path("/proc/meminfo"))
    if "MemAvailable:" in words:
        return int(words[words.index("MemAvailable:") + 1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2  # macOS has no figure for what is available


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
