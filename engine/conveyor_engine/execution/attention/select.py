"""Chooses the attention backend for a device. Called by `runners.generate` once."""

import torch

from conveyor_engine.config.engine_config import AttentionBackendName
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import kernels
from conveyor_engine.execution.attention import cpu_native
from conveyor_engine.execution.attention.backend import AttentionBackend
from conveyor_engine.execution.attention.torch_paged import TorchPaged


def select_backend(
    name: AttentionBackendName, device: torch.device, dtype: torch.dtype, block_size: int
) -> AttentionBackend:
    """The backend called `name`, or for auto the fastest that works here. Raises ConfigError."""
    obstacles: dict[AttentionBackendName, str | None] = {
        "native": _native_obstacle(device, dtype, block_size),
        "triton": kernels.why_missing(device),
        "torch": None,
    }
    if name == "auto":
        name = next(candidate for candidate, obstacle in obstacles.items() if obstacle is None)
    if obstacle := obstacles[name]:
        raise ConfigError(f"attention_backend {name} cannot be used: {obstacle}; use auto")
    if name == "triton":
        from conveyor_engine.execution.attention.triton_backend import (
            TritonPaged,  # needs triton, which not every machine has
        )

        return TritonPaged()
    return cpu_native.CpuNative() if name == "native" else TorchPaged()


def _native_obstacle(device: torch.device, dtype: torch.dtype, block_size: int) -> str | None:
    if device.type != "cpu":
        return f"it runs on CPUs, and the device is {device.type}"
    return cpu_native.find_obstacle(block_size, dtype)
