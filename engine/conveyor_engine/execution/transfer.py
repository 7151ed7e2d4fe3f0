"""Numbers on their way between the host and the device. Neither way waits for what the device still has to do."""

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The same numbers there; on a CPU the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors of one device that come to the host behind all that the device has been given so far."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # pinned, if they come from a GPU
        self._arrived: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(tensors[0].device))

    def wait(self) -> list[torch.Tensor]:
        """Raises what the device raised on the way."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copies
