"""Stores numbers for each row, which are written on the host at admission and read on the device in every step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.transfer import copy_into, to_device


class RowValues:
    """An array with values for all rows, on the host and on the device.

    On a CPU both share memory. To another device, the whole array is copied before the first read after a change.
    """

    def __init__(self, values: npt.NDArray[Any], device: torch.device) -> None:
        """values (max_num_seqs, ...)."""
        self.host = values
        self._on_device = to_device(values, device)
        self._stale = False

    @classmethod
    def full(
        cls, max_num_seqs: int, value: float, dtype: npt.DTypeLike, device: torch.device, width: int = 1
    ) -> "RowValues":
        """Make an array (max_num_seqs, width) filled with `value`."""
        return cls(np.full((max_num_seqs, width), value, dtype=dtype), device)

    def __setitem__(self, row: int, value: object) -> None:
        self.host[row] = value
        self._stale = True

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of `rows`, int64 (n,): (n, ...)."""
        return self.on_device()[rows]

    def on_device(self) -> torch.Tensor:
        """Return the values of all rows, always at the same address, so that a CUDA graph can read them."""
        if self._stale and self._on_device.device.type != "cpu":
            copy_into(self._on_device, self.host)
        self._stale = False
        return self._on_device


class RowLists:
    """A list of numbers for each row. All lists have the same length: shorter ones repeat their last number."""

    def __init__(self, max_num_seqs: int, dtype: npt.DTypeLike, device: torch.device) -> None:
        self._device = device
        self._values = RowValues.full(max_num_seqs, 0, dtype, device)

    def __setitem__(self, row: int, values: Sequence[float]) -> None:
        """Set the row's list, which must not be empty."""
        missing = len(values) - self._values.host.shape[1]
        if missing > 0:
            self._values = RowValues(np.pad(self._values.host, ((0, 0), (0, missing)), mode="edge"), self._device)
        repeated = self._values.host.shape[1] - len(values)
        self._values[row] = (*values, *values[-1:] * repeated)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of `rows`, int64 (n,), padded to the longest: (n, longest)."""
        return self._values[rows]
