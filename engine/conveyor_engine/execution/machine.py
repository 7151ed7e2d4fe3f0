"""Finds what this machine has: device, number types, memory, CPUs. Called by the runners at start.

The limits of the container (cgroup v2, then v1) count, not those of its host.
"""

import os
from pathlib import Path

import torch
from transformers import PretrainedConfig

from conveyor_engine.config.engine_config import Device, Dtype
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import cuda_device
from conveyor_protocol.failure_reasons import FailureReason

_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")
# Files of the limit, the usage and the statistics; the statistic of the file cache, which the kernel can reclaim.
_CGROUP_MEMORY = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def choose_device(device: Device) -> torch.device:
    """The device to run on.

    Raises ConfigError (NoDevice) if there is a GPU that cannot be used, and for `cuda` if there is none.
    """
    if device == "cpu":
        return torch.device("cpu")
    problem = cuda_device.start()
    if problem is None:
        return torch.device("cuda")
    if cuda_device.is_present():
        raise ConfigError(
            f"there is a GPU, but CUDA cannot start: {problem}. Check the node's driver and its container "
            "toolkit; to run on the CPU, ask for no GPU (resources.limits) and set `device: auto`",
            reason=FailureReason.NO_DEVICE,
        )
    if device == "auto":
        return torch.device("cpu")
    raise ConfigError(
        "`device: cuda` is set, but no CUDA device is visible here; ask for a GPU (resources.limits: "
        f"nvidia.com/gpu: 1), or set `device: auto` to run on the CPU. The error of CUDA: {problem}",
        reason=FailureReason.NO_DEVICE,
    )


def choose_dtype(dtype: Dtype, device: torch.device, model_config: PretrainedConfig) -> torch.dtype:
    """The type of weights, activations and KV cache.

    auto on CUDA: float16 for a model saved in it, else bfloat16; on a CPU: bfloat16 where the CPU computes in it, else
    float32.
    """
    if dtype == "float16" and device.type == "cpu":
        raise ConfigError(
            "`dtype: float16` is set, which CPUs compute many times slower; "
            "use `dtype: auto`, `dtype: bfloat16` or `dtype: float32`"
        )
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return torch.float16 if getattr(model_config, "dtype", None) == torch.float16 else torch.bfloat16


def cpu_has_bfloat16() -> bool:
    """Whether the CPU has bfloat16 instructions (AVX512-BF16, AMX, Arm BF16)."""
    try:
        words = set(_CPUINFO.read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def num_cpus() -> int:
    """CPUs that this process may use: those of its affinity, at most the container's limit rounded up."""
    available = len(os.sched_getaffinity(0))
    quota = _read_words(_CGROUP / "cpu.max")
    if not quota:
        quota = [
            *_read_words(_CGROUP / "cpu/cpu.cfs_quota_us"),
            *_read_words(_CGROUP / "cpu/cpu.cfs_period_us"),
        ]
    if len(quota) == 2 and quota[0] not in ("max", "-1"):
        return max(1, min(available, -(-int(quota[0]) // int(quota[1]))))
    return available


def free_memory_bytes(device: torch.device) -> int:
    """Free memory of the device, within the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available_bytes()
    for limit, usage, stat, cache in _CGROUP_MEMORY:
        words = _read_words(_CGROUP / limit) + _read_words(_CGROUP / usage)
        if len(words) == 2 and words[0] != "max":
            free = min(free, int(words[0]) - int(words[1]) + _stat(_CGROUP / stat, cache))
    return max(0, free)


def _stat(path: Path, name: str) -> int:
    """One figure of a cgroup's memory.stat, 0 if it is not there."""
    words = _read_words(path)
    return int(words[words.index(name) + 1]) if name in words else 0


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
