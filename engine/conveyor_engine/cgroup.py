"""What the kernel says about this container's memory. Used by `async_engine` to explain a killed process."""

from pathlib import Path

_MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")  # cgroup v2, as a container sees its own


def count_oom_kills() -> int:
    """Processes of this container that the kernel has killed for want of memory; 0 where it does not say."""
    try:
        lines = _MEMORY_EVENTS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
