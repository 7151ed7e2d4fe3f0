"""Numbers of each row: written on the host when a row is admitted, read on the device in every step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.transfer import copy_into, to_device


class RowValues:
    """An array of all rows. On a CPU both copies share memory; to another device it is copied whole after a change."""

    def __init__(self, values: npt.NDArray[Any], device: torch.device) -> None:
        """values (max_num_seqs, ...)."""
        self.host = values
        self._on_device = to_device(values, device)
        self._stale = False

    @classmethod
    def full(
        cls, max_num_seqs: int, value: float, dtype: npt.DTypeLike, device: torch.device, width: int = 1
    ) -> "RowValues":
        """One value for each row, (max_num_seqs, width)."""
        return cls(np.full((max_num_seqs, width), value, dtype=dtype), device)

    def __setitem__(self, row: int, value: object) -> None:
        self.host[row] = value
        self._stale = True

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of `rows`, int64 (n,): (n, ...)."""
        return self.on_device()[rows]

    def on_device(self) -> torch.Tensor:
        """The values of all rows, always in the same memory, so that a graph can read them."""
        if self._stale and self._on_device.device.type != "cpu":
            copy_into(self._on_device, self.host)
        self._stale = False
        return self._on_device


class RowLists:
    """A list of numbers for each row. A shorter list repeats its last one, so that all have the longest's length."""

    def __init__(self, max_num_seqs: int, dtype: npt.DTypeLike, device: torch.device) -> None:
        self._device = device
        self._values = RowValues.full(max_num_seqs, 0, dtype, device)

    def __setitem__(self, row: int, values: Sequence[float]) -> None:
        """`values` is not empty."""
        missing = len(values) - self._values.host.shape[1]
        if missing > 0:
            self._values = RowValues(np.pad(self._values.host, ((0, 0), (0, missing)), mode="edge"), self._device)
        repeated = self._values.host.shape[1] - len(values)
        self._values[row] = (*values, *values[-1:] * repeated)

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the values of `rows`, int64 (n,), padded to the longest: (n, longest)."""
        return self._values[rows]
