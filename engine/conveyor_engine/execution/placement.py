"""The placement of a runner: its device, and its rank among the processes of one model.

Opened by `build` and passed to a runner, which opens no device itself. Knows no models.
"""

import os
from dataclasses import dataclass

import torch

from conveyor_engine import cgroup
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import machine


@dataclass(frozen=True, slots=True)
class Placement:
    """One process of those that compute a model together. A model on one device has one, of rank 0."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


def open_placement(config: EngineConfig) -> Placement:
    """Opens the configured device. On a CPU, sets torch's number of threads too. Raises ConfigError."""
    device = machine.choose_device(config.device)
    if device.type == "cpu":
        _set_num_threads(config.num_threads)
    return Placement(device)


def _set_num_threads(num_threads: int | None) -> None:
    """Threads as configured, else as OMP_NUM_THREADS says, else one for each CPU of the container's limit."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cgroup.num_cpus())


def free_cached_memory(device: torch.device) -> None:
    """Returns torch's cached memory to the device. Raises if the device is broken."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
