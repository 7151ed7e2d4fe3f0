"""Logit processors, and the pipeline by which `sampler` applies them to the rows that use them.

A processor keeps its state of each row on the device, written when the row gets its request. A step in which no row
uses it skips it.
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
    device_rows: torch.Tensor  # the same on the device, int64
    device_positions: torch.Tensor

    @classmethod
    def of(cls, rows: Int64, positions: Int64, device: torch.device) -> "Samples":
        """Copies both to the device."""
        return cls(rows, positions, to_device(rows, device), to_device(positions, device))

    def select(self, entries: Int64) -> tuple[torch.Tensor | slice, "Samples"]:
        """The index of these entries in the logits, and they alone. If they are all, the index is a slice: no copy."""
        if len(entries) == len(self.rows):
            return slice(None), self
        index = to_device(entries, self.device_rows.device)
        rows, positions = self.device_rows[index], self.device_positions[index]
        return index, Samples(self.rows[entries], self.positions[entries], rows, positions)


class LogitProcessor(Protocol):
    """One change of the logits that rows can ask for."""

    changes_best: bool  # whether it can make another token the best; if not, greedy rows skip it

    def set_row(self, row: int, sampling: RowSampling) -> int:
        """Sets the row's state.

        Returns the position before which the row's tokens need the processor: 0 if none do, ALWAYS if all do.
        """
        ...

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        """Changes logits (entries, vocabulary) in place: those of `users` alone, which are indices of entries.

        They are float32. A processor that keeps the best token gets logits less the row's largest, of all tokens or of
        the best few: it keeps their order. A row's result depends on its own state and logits, never on the rest of the
        batch.
        """
        ...


class Pipeline:
    """Processors in the order in which they act, and which rows use each."""

    def __init__(self, processors: Sequence[LogitProcessor], max_num_seqs: int) -> None:
        self._processors = processors
        self._needed_before = np.zeros((len(processors), max_num_seqs), dtype=np.int64)  # position

    def set_row(self, row: int, sampling: RowSampling) -> None:
        for index, processor in enumerate(self._processors):
            self._needed_before[index, row] = processor.set_row(row, sampling)

    def is_used(self, samples: Samples) -> bool:
        """Whether some entry uses a processor."""
        return bool(self._find_used(samples).any())

    def _find_used(self, samples: Samples) -> npt.NDArray[np.bool_]:
        """(processors, entries)."""
        used: npt.NDArray[np.bool_] = samples.positions < self._needed_before[:, samples.rows]
        return used

    def apply(self, logits: torch.Tensor, samples: Samples, *, in_place: bool) -> torch.Tensor:
        """The processed logits (entries, vocabulary) in float32; the same tensor if no entry uses a processor."""
        used = self._find_used(samples)
        if not used.any():
            return logits
        changed = logits.to(torch.float32, copy=not in_place)
        for processor, mask in zip(self._processors, used, strict=True):
            if mask.any():
                processor.apply(changed, samples, mask.nonzero()[0])
        return changed
