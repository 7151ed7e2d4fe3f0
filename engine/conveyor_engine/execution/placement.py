"""The placement of a runner: its device, and its rank among the processes of one model.

Opened by `build` and `ranks`, and passed to a runner, which opens no device itself. Knows no models.
"""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed

from conveyor_engine import cgroup
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine

_LONGEST_WAIT: Final = timedelta(hours=2)  # of a rank for another one: while a large model is loaded, all others wait


@dataclass(frozen=True, slots=True)
class Placement:
    """One process of those that compute a model together. A model on one device has one, of rank 0."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def wait_for_others(self) -> None:
        """Return when all ranks have called it."""
        if self.world_size > 1:
            torch.distributed.all_reduce(torch.zeros(1, device=self.device))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def agree_on_least(self, number: int) -> int:
        """Return the least number that a rank has called it with."""
        if self.world_size == 1:
            return number
        least = torch.tensor([number], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least.item())


def open_placement(config: EngineConfig, rank: int = 0, world_size: int = 1, meeting: str = "") -> Placement:
    """Open the configured device, on CUDA that with the rank's number, and meet the other ranks.

    On a CPU, sets torch's number of threads too, of which each rank gets an equal share. `meeting` is a file that all
    ranks can reach and none has used. Raises ConfigError.
    """
    device = machine.choose_device(config.device)
    if device.type == "cpu":
        _set_num_threads(config.num_threads, world_size)
    if world_size > 1:
        _meet(device, rank, world_size, meeting)
    return Placement(device, rank, world_size)


def _meet(device: torch.device, rank: int, world_size: int, meeting: str) -> None:
    if device.type == "cuda":
        if (found := torch.cuda.device_count()) < world_size:
            raise ConfigError(
                f"`tensor_parallel_size: {world_size}` is set, and {found} CUDA devices are visible here; ask for as "
                "many GPUs (resources.limits)"
            )
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the ranks of an engine share a host
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=_LONGEST_WAIT,
    )


def _set_num_threads(num_threads: int | None, world_size: int) -> None:
    """Threads as configured, else as OMP_NUM_THREADS says, else one for each CPU of the container's limit."""
    if num_threads is not None:
        torch.set_num_threads(max(1, num_threads // world_size))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cgroup.num_cpus() // world_size))


def free_cached_memory(device: torch.device) -> None:
    """Returns torch's cached memory to the device. Raises if the device is broken."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
