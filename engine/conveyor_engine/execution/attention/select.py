"""Chooses the attention backend for a device. Called once by `tasks.generate` or `tasks.transcribe`."""

import torch

from conveyor_engine.config.engine_config import AttentionBackendName, KVCacheDtype
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import kernels
from conveyor_engine.execution.attention import cpu_native
from conveyor_engine.execution.attention.backend import AttentionBackend
from conveyor_engine.execution.attention.torch_paged import TorchPaged

KV_DTYPES: dict[KVCacheDtype, torch.dtype | None] = {"auto": None, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
_OLDEST_WITH_FP8 = (8, 9)


def select_backend(
    name: AttentionBackendName,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> AttentionBackend:
    """Return the backend called `name`; for auto, the fastest one that works on this device. Raises ConfigError."""
    obstacles: dict[AttentionBackendName, str | None] = {
        "native": _native_obstacle(device, dtype, block_size),
        "triton": kernels.why_missing(device),
        "torch": None,
    }
    if name == "auto":
        name = next(candidate for candidate, obstacle in obstacles.items() if obstacle is None)
    if obstacle := obstacles[name]:
        raise ConfigError(f"attention_backend {name} cannot be used: {obstacle}; use auto")
    if kv_cache_dtype != "auto":
        _check_kv_cache(kv_cache_dtype, name, device)
    if name == "triton":
        from conveyor_engine.execution.attention.triton_backend import (
            TritonPaged,  # needs triton, which not every machine has
        )

        return TritonPaged(kv_dtype=KV_DTYPES[kv_cache_dtype])
    return cpu_native.CpuNative() if name == "native" else TorchPaged()


def _check_kv_cache(kv_cache_dtype: KVCacheDtype, backend: AttentionBackendName, device: torch.device) -> None:
    """Raise ConfigError if the backend does not support this type of cache, or the GPU does not support the type."""
    if backend != "triton":
        why = kernels.why_missing(device) or f"`attention_backend: {backend}` is set"
        raise ConfigError(
            f"`kv_cache_dtype: {kv_cache_dtype}` is for the Triton kernels on CUDA, which this engine does not use: "
            f"{why}; use `kv_cache_dtype: auto`"
        )
    if kv_cache_dtype == "fp8" and (capability := torch.cuda.get_device_capability(device)) < _OLDEST_WITH_FP8:
        raise ConfigError(
            "`kv_cache_dtype: fp8` needs a GPU with compute capability 8.9 or newer (NVIDIA's Ada and Hopper "
            f"generations and later ones), and this one has {capability[0]}.{capability[1]}; use `kv_cache_dtype: int8`"
        )


def _native_obstacle(device: torch.device, dtype: torch.dtype, block_size: int) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPUs, and the device is {device.type}"
    return cpu_native.find_obstacle(block_size, dtype)
