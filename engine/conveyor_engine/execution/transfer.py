"""Copies between host and device. Neither waits for the work that the device still has to do."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device; on a CPU it shares the array's memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_into(tensor: torch.Tensor, array: npt.NDArray[Any]) -> None:
    """Copies the array into a contiguous tensor of its shape and type, behind all work that the device has so far."""
    source = torch.from_numpy(array)
    tensor.copy_(source.pin_memory() if tensor.is_cuda else source, non_blocking=True)


def stack_pictures(
    pictures: Sequence[bytes | memoryview], shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """float32 numbers of pictures of one shape -> (pictures, channels, height, width), in the model's number type."""
    batch = torch.empty((len(pictures), *shape), dtype=torch.float32, pin_memory=device.type == "cuda")
    rows = batch.view(len(pictures), -1).numpy()
    for number, pixels in enumerate(pictures):
        rows[number] = np.frombuffer(pixels, dtype=np.float32)
    return batch.to(device, non_blocking=True).to(dtype)


class HostCopy:
    """A copy of one device's tensors to the host, queued behind all work that the device has been given so far."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        """The tensors may be overwritten by what follows. The copies are pinned, if they come from a GPU."""
        self._copies = [t.to("cpu", non_blocking=True) if t.is_cuda else t.clone() for t in tensors]
        self._arrived: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once they have arrived. Raises what the device raised meanwhile."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
