"""The interface of logit processors, and the pipeline with which `sampler` applies them to the rows that use them.

A processor keeps a state for each row on the device, and sets it when a request gets the row. A step skips processors
that no row uses.
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
    """The row and the position of each entry of the logits, in the plan's order."""

    rows: Int64
    positions: Int64  # of the tokens to be sampled
    device_rows: torch.Tensor  # `rows` on the device, int64
    device_positions: torch.Tensor

    @classmethod
    def of(cls, rows: Int64, positions: Int64, device: torch.device) -> "Samples":
        """Make Samples, which copies both arrays to the device."""
        return cls(rows, positions, to_device(rows, device), to_device(positions, device))

    def select(self, entries: Int64) -> tuple[torch.Tensor | slice, "Samples"]:
        """Return the index of these entries in the logits, and the Samples for them.

        If they are all entries, the index is a slice, so that indexing does not copy.
        """
        if len(entries) == len(self.rows):
            return slice(None), self
        index = to_device(entries, self.device_rows.device)
        rows, positions = self.device_rows[index], self.device_positions[index]
        return index, Samples(self.rows[entries], self.positions[entries], rows, positions)


class LogitProcessor(Protocol):
    """A change of the logits that a request's parameters can enable."""

    changes_best: bool  # whether it can change which token is best; if not, greedy rows skip it

    def set_row(self, row: int, sampling: RowSampling) -> int:
        """Set the row's state for a new request.

        Returns the position up to which (exclusive) the row's tokens need the processor: 0 for none, ALWAYS for all.
        """
        ...

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        """Change logits, float32 (entries, vocabulary), in place, but only for `users`, which are indices of entries.

        If `changes_best` is false, the row's largest logit has been subtracted from each logit, and there may be
        columns for only the few best tokens. Such a processor must keep the order of the logits. A row's result depends
        only on its own state and logits, not on the rest of the batch.
        """
        ...


class Pipeline:
    """Applies processors in order, each to the rows that use it."""

    def __init__(self, processors: Sequence[LogitProcessor], max_num_seqs: int) -> None:
        self._processors = processors
        self._needed_before = np.zeros((len(processors), max_num_seqs), dtype=np.int64)  # results of `set_row`

    def set_row(self, row: int, sampling: RowSampling) -> None:
        for index, processor in enumerate(self._processors):
            self._needed_before[index, row] = processor.set_row(row, sampling)

    def is_used(self, samples: Samples) -> bool:
        """Return whether any entry uses a processor."""
        return bool(self._find_used(samples).any())

    def _find_used(self, samples: Samples) -> npt.NDArray[np.bool_]:
        """Return which entries use which processor: bool (processors, entries)."""
        used: npt.NDArray[np.bool_] = samples.positions < self._needed_before[:, samples.rows]
        return used

    def apply(self, logits: torch.Tensor, samples: Samples, *, in_place: bool) -> torch.Tensor:
        """Return the processed logits (entries, vocabulary), float32; `logits` itself if no entry uses a processor.

        in_place: the processors may change `logits` if it is float32.
        """
        used = self._find_used(samples)
        if not used.any():
            return logits
        changed = logits.to(torch.float32, copy=not in_place)
        for processor, mask in zip(self._processors, used, strict=True):
            if mask.any():
                processor.apply(changed, samples, mask.nonzero()[0])
        return changed
