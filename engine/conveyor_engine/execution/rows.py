"""Stores the state of each row on the device between steps: its tokens, its block table and its adapter.

`tasks.generate` and `tasks.transcribe` apply each plan's changes and write the sampled tokens back, so that the inputs
of the next step are already on the device. Knows rows, not requests.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import torch

from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import AdmittedRow, StepPlan


class Rows:
    """The state arrays on the device, by row."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        max_blocks = -(-max_model_len // block_size)
        self._device = device
        # One more than the context: the token sampled at the last position is stored too, although it is never
        # computed.
        self.token_ids = torch.zeros((max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self._num_blocks = [0] * max_num_seqs
        self.adapters = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._adapters = [0] * max_num_seqs  # the same on the host
        # What is added to the position of a token behind pictures; None: the model has one position for each token.
        self.shifts: torch.Tensor | None = None

    def after(self, num_blocks: int) -> Self:
        """Return a view of these rows without the first `num_blocks` blocks of each table. Never `update` the view."""
        view = copy(self)
        view.block_tables = self.block_tables[:, num_blocks:]
        return view

    def use_shifts(self) -> None:
        """Let rows have shifted positions."""
        self.shifts = torch.zeros(len(self._num_blocks), dtype=torch.int64, device=self._device)

    def shift_positions(self, positions: torch.Tensor, token_rows: torch.Tensor | None) -> torch.Tensor:
        """Return the positions (1, T) of these rows' tokens for the model's rotary embedding."""
        return positions if self.shifts is None or token_rows is None else positions + self.shifts[token_rows]

    def shift(self, row: int, shift: int) -> None:
        """Set what is added to the position of each token of the row."""
        if self.shifts is not None:
            self.shifts[row] = shift

    def list_adapters(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the adapters that these rows use, without 0 for none, ascending."""
        return sorted({self._adapters[row] for row in rows} - {0})

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's changes since the last step."""
        for admitted in plan.admitted:
            self._set_row(admitted)
        if plan.new_blocks:
            self._append_blocks(plan.new_blocks)

    def _set_row(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        self.token_ids[row, : len(admitted.token_ids)] = self._to_device(admitted.token_ids)
        self.block_tables[row, : len(admitted.block_ids)] = self._to_device(admitted.block_ids)
        self._num_blocks[row] = len(admitted.block_ids)
        if self._adapters[row] != admitted.adapter:
            self._adapters[row] = admitted.adapter
            self.adapters[row] = admitted.adapter

    def _append_blocks(self, new_blocks: Sequence[tuple[int, list[int]]]) -> None:
        places: list[tuple[int, int, int]] = []
        for row, blocks in new_blocks:
            first = self._num_blocks[row]
            places += [(row, first + index, block) for index, block in enumerate(blocks)]
            self._num_blocks[row] = first + len(blocks)
        row_of, column, block_ids = self._to_device(places).unbind(1)
        self.block_tables[row_of, column] = block_ids

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens to the rows. All arguments are (samples,).

        -1 (no token) is written as 0; its request ends in an error.
        """
        self.token_ids[rows, positions] = token_ids.clamp_min(0).int()

    def _to_device(self, values: Sequence[int] | Sequence[tuple[int, ...]]) -> torch.Tensor:
        return to_device(np.array(values, dtype=np.int32), self._device)
