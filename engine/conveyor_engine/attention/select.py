"""Chooses the attention backend for a device. Called by `model_runner` once."""

import torch

from conveyor_engine.attention.backend import AttentionBackend
from conveyor_engine.attention.torch_paged import TorchPaged
from conveyor_engine.config import AttentionBackendName
from conveyor_engine.errors import ConfigError


def select_backend(name: AttentionBackendName, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`, or for auto the fastest that works here. Raises ConfigError."""
    if name in ("auto", "torch"):
        return TorchPaged()
    raise ConfigError(f"attention_backend {name} does not work on {device.type}; use auto")
