"""Copies between host and device. Starting a copy does not make the host wait for the device's earlier work."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on the device. On a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_into(tensor: torch.Tensor, array: npt.NDArray[Any]) -> None:
    """Copy the array into a contiguous tensor of its shape and type, after all work that is queued on the device."""
    source = torch.from_numpy(array)
    tensor.copy_(source.pin_memory() if tensor.is_cuda else source, non_blocking=True)


def stack_pictures(
    pictures: Sequence[bytes | memoryview], shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Stack pictures of one shape, each given as float32 numbers, into (pictures, channels, height, width) of type
    `dtype`."""
    batch = torch.empty((len(pictures), *shape), dtype=torch.float32, pin_memory=device.type == "cuda")
    rows = batch.view(len(pictures), -1).numpy()
    for number, pixels in enumerate(pictures):
        rows[number] = np.frombuffer(pixels, dtype=np.float32)
    return batch.to(device, non_blocking=True).to(dtype)


class HostCopy:
    """A copy of one device's tensors to the host. It runs after all work that the device has been given so far."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """Start the copy. Later work may overwrite the tensors. Copies from a GPU are in pinned memory."""
        self._copies = [t.to("cpu", non_blocking=True) if t.is_cuda else t.clone() for t in tensors]
        self._arrived: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            # With `blocking`, the thread sleeps until the copy has arrived. Otherwise CUDA keeps a core busy meanwhile.
            self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """Wait for the copy, and return the tensors on the host. Raises errors that the device has raised meanwhile."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
