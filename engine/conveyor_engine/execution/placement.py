"""Defines on which device a runner is, and which rank it has among the processes of one model.

`build` opens a placement and passes it to a runner, which opens no device itself. Knows no models.
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

_LONGEST_WAIT: Final = timedelta(hours=2)  # for another rank; while one rank loads a large model, all others wait


@dataclass(frozen=True, slots=True)
class Placement:
    """One of the processes that compute a model together. A model on one device has one process, rank 0."""

    device: torch.device
    rank: int = 0
    world_size: int = 1

    def wait_for_others(self) -> None:
        """Wait until all ranks have called this method."""
        if self.world_size > 1:
            torch.distributed.all_reduce(torch.zeros(1, device=self.device))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def agree_on_least(self, number: int) -> int:
        """Return the smallest of the numbers with which the ranks call this method."""
        if self.world_size == 1:
            return number
        least = torch.tensor([number], dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
        return int(least.item())


def open_placement(config: EngineConfig, rank: int = 0, world_size: int = 1, meeting: str = "") -> Placement:
    """Open the configured device and meet the other ranks. On CUDA, the rank is the number of the device.

    On a CPU, also sets torch's number of threads. meeting: path of a new file that all ranks can reach. Raises
    ConfigError.
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
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of an engine are on one host
    torch.distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=_LONGEST_WAIT,
    )


def _set_num_threads(num_threads: int | None, world_size: int) -> None:
    """Set this rank's number of threads.

    The number is this rank's share of `num_threads`. If that is None, OMP_NUM_THREADS applies, undivided. Without
    OMP_NUM_THREADS, the number is this rank's share of the CPUs in the container's limit.
    """
    if num_threads is not None:
        torch.set_num_threads(max(1, num_threads // world_size))
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cgroup.num_cpus() // world_size))


def free_cached_memory(device: torch.device) -> None:
    """Return torch's cached memory to the device. Raises if the device is broken."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
