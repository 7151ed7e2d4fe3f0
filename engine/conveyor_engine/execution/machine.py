"""Finds the device to run on and the number type that it computes in, and gives back memory. Used by
`placement`, `start` and runners.

torch finds no device if the node has no GPU, if its driver is too old, or if the driver is not mounted. Only in the
first case `device: auto` may run on the CPU. So this module looks for the device files and initializes the driver
itself to find out whether there is a GPU. torch's error shows the user which case it is.
"""

import ctypes
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from conveyor_engine import cgroup
from conveyor_engine.config.engine_config import Device, Dtype
from conveyor_engine.errors import ConfigError
from conveyor_protocol.failure_reasons import FailureReason

_CPUINFO = Path("/proc/cpuinfo")
OLDEST_CAPABILITY = (8, 0)  # older GPUs emulate bfloat16, and have too little shared memory for the kernels' tiles
_OLDEST_DRIVER = {"12": "525", "13": "580"}  # by CUDA's major version; all its minor versions run on this driver
_DEVICE_FILES = Path("/dev"), "nvidia[0-9]*"
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_RETURNED_BYTES = 32 << 20  # of packed weights, between two returns of memory to the system


def give_back_memory() -> None:
    """Return freed memory to the system. The C library keeps what was freed between tensors that are still used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


@dataclass(slots=True)
class MemoryReturn:
    """Returns freed memory to the system now and then, while weights are packed."""

    returned_bytes: int = 0

    def reach(self, packed_bytes: int) -> None:
        """Return memory if many bytes of weights were packed since the last time. packed_bytes: of all until now."""
        if packed_bytes - self.returned_bytes > _RETURNED_BYTES:
            self.returned_bytes = packed_bytes
            give_back_memory()


def choose_device(device: Device) -> torch.device:
    """Return the device to run on.

    Raises ConfigError (NoDevice) if there is a GPU that cannot be used, and for `cuda` if there is none.
    """
    if device == "cpu":
        return torch.device("cpu")
    problem = _start_cuda()
    if problem is None:
        return torch.device("cuda")
    if _has_gpu():
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
    """Return the type of weights, activations and KV cache.

    DeBERTa v1 is computed in float32, because transformers' class fails with other types.
    auto on CUDA: float16 for a model saved in float16, otherwise bfloat16. auto on a CPU: bfloat16 if the CPU has
    instructions for it, otherwise float32.
    """
    if dtype == "float16" and device.type == "cpu":
        raise ConfigError(
            "`dtype: float16` is set, which CPUs compute many times slower; "
            "use `dtype: auto`, `dtype: bfloat16` or `dtype: float32`"
        )
    if model_config.model_type == "deberta":
        if dtype not in ("auto", "float32"):
            raise ConfigError(f"`dtype: {dtype}` is set, and DeBERTa v1 runs in float32 only; use `dtype: auto`")
        return torch.float32
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    return torch.float16 if getattr(model_config, "dtype", None) == torch.float16 else torch.bfloat16


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions (AVX512-BF16, AMX, Arm BF16)."""
    try:
        words = set(_CPUINFO.read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of the device, within the container's limit."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else cgroup.free_memory_bytes()


def _start_cuda() -> str | None:
    """Start CUDA. Return None if it has started; otherwise torch's error, and the driver version that torch needs.

    Raises ConfigError for a GPU that is too old.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:  # an AssertionError if torch was built without CUDA
        return f"{' '.join(str(error).split()).removesuffix('.')}{_driver_needed()}"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < OLDEST_CAPABILITY:
        raise ConfigError(
            f"the GPU is of type {torch.cuda.get_device_name()} with compute capability {major}.{minor}, and this "
            "engine needs 8.0 or newer: choose nodes with a GPU of NVIDIA's Ampere generation or a later one",
            reason=FailureReason.NO_DEVICE,
        )
    return None


def _has_gpu() -> bool:
    """Return whether there is a GPU that CUDA_VISIBLE_DEVICES does not hide, or a driver that fails to start."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    folder, pattern = _DEVICE_FILES
    return any(folder.glob(pattern)) or _init_driver() not in (None, _NO_DEVICE)


def _init_driver() -> int | None:
    """Return the result of cuInit in the driver's library, 0 for success; None if there is no such library."""
    try:
        return int(ctypes.CDLL("libcuda.so.1").cuInit(0))
    except (OSError, AttributeError):
        return None


def _driver_needed() -> str:
    cuda = torch.version.cuda
    oldest = _OLDEST_DRIVER.get((cuda or "").partition(".")[0])
    if oldest is None:
        return ""
    return f"; torch {torch.__version__} needs NVIDIA's driver {oldest} or newer, {_driver_found()}"


def _driver_found() -> str:
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER_VERSION.read_text())
    except OSError:
        found = None
    return f"and this node has {found[0]}" if found else "and this node shows none"
