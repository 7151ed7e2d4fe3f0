"""What changes the logits before a token is chosen, and how `sampler` finds out whom it concerns.

A processor keeps what it needs of each row on the device, written when the row is admitted. Rows that do not use it
cost nothing: a step in which nobody does goes without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import RowSampling

ALWAYS = np.iinfo(np.int64).max

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Samples:
    """Whose logits they are: one entry for each of them, in the plan's order."""

    rows: Int64
    positions: Int64  # of the tokens to be sampled
    device_rows: torch.Tensor  # the same on the device, int64
    device_positions: torch.Tensor

    @classmethod
    def of(cls, rows: Int64, positions: Int64, device: torch.device) -> "Samples":
        """Brings both to the device."""
        return cls(rows, positions, to_device(rows, device), to_device(positions, device))

    def select(self, entries: Int64) -> tuple[torch.Tensor | slice, "Samples"]:
        """These entries alone, and an index of the logits that gives theirs: a slice, which copies nothing, if all."""
        if len(entries) == len(self.rows):
            return slice(None), self
        index = to_device(entries, self.device_rows.device)
        rows, positions = self.device_rows[index], self.device_positions[index]
        return index, Samples(self.rows[entries], self.positions[entries], rows, positions)


class LogitProcessor(Protocol):
    """One way in which rows ask for other logits than the model's."""

    changes_best: bool  # whether another token may become the best; if not, rows that take the best go without it

    def admit(self, row: int, sampling: RowSampling) -> int:
        """Keeps what it needs of the row, in place of what it kept there.

        Returns the position before which the row's tokens need it: 0 if none do, ALWAYS if all do.
        """
        ...

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        """Changes logits (entries, vocabulary) in place: those of `users` alone, which are indices of entries.

        One that keeps the best token is given float32, less the row's largest. What a row gets depends on its own
        state and logits, never on the rest of the batch.
        """
        ...


class Pipeline:
    """Processors in the order in which they act, and which rows use each."""

    def __init__(self, processors: Sequence[LogitProcessor], max_num_seqs: int) -> None:
        self._processors = processors
        self._needed_before = np.zeros((len(processors), max_num_seqs), dtype=np.int64)  # position

    def admit(self, row: int, sampling: RowSampling) -> None:
        for index, processor in enumerate(self._processors):
            self._needed_before[index, row] = processor.admit(row, sampling)

    def apply(self, logits: torch.Tensor, samples: Samples, *, in_place: bool) -> torch.Tensor:
        """What the processors make of logits (entries, vocabulary); the same tensor if nobody uses any."""
        used = samples.positions < self._needed_before[:, samples.rows]
        if not used.any():
            return logits
        changed = logits if in_place else logits.clone()
        for processor, mask in zip(self._processors, used, strict=True):
            if mask.any():
                processor.apply(changed, samples, mask.nonzero()[0])
        return changed
