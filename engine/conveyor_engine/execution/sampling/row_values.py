"""Numbers of each row: written on the host when a row is admitted, read on the device in every step."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.transfer import to_device


class RowValues:
    """An array of all rows. On a CPU both copies share memory; to another device it is copied whole after a change."""

    def __init__(self, values: npt.NDArray[Any], device: torch.device) -> None:
        """values (max_num_seqs, ...)."""
        self.host = values
        self._on_device = to_device(values, device)
        self._stale = False

    @classmethod
    def full(cls, max_num_seqs: int, value: float, dtype: npt.DTypeLike, device: torch.device) -> "RowValues":
        """One value for each row, (max_num_seqs, 1)."""
        return cls(np.full((max_num_seqs, 1), value, dtype=dtype), device)

    def __setitem__(self, row: int, value: object) -> None:
        self.host[row] = value
        self._stale = True

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows, int64 (n,): (n, ...)."""
        if self._stale and self._on_device.device.type != "cpu":
            self._on_device = to_device(self.host, self._on_device.device)
        self._stale = False
        return self._on_device[rows]
