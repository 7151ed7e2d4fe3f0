"""Stores the state of each row on the device between steps: its tokens, its block table and its adapter.

`tasks.generate` and `tasks.transcribe` apply each plan's changes and write the sampled tokens back, so that the inputs
of the next step are already on the device. Knows rows, not requests.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import AdmittedRow, StepPlan


class Rows:
    """The state arrays on the device, by row."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        parts: Sequence[int] = (1,),
        num_full: int = 1,
    ) -> None:
        """parts: the factor of each block table's numbers, see `Spot`. num_full: how many tables have no window."""
        max_blocks = -(-max_model_len // block_size)
        self._block_size = block_size
        self._parts, self._has_parts = np.array(parts, dtype=np.int32)[:, None], max(parts) > 1
        self._full, self._windowed = slice(0, num_full), slice(num_full, len(parts))
        self._device = device
        # One more than the context: the token sampled at the last position is stored too, although it is never
        # computed.
        self.token_ids = torch.zeros((max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        self.tables = torch.zeros((len(parts), max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self._num_blocks = [0] * max_num_seqs
        self.adapters = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._adapters = [0] * max_num_seqs  # the same on the host
        # What is added to the position of a token behind pictures; None: the model has one position for each token.
        self.shifts: torch.Tensor | None = None

    def after(self, num_blocks: int) -> Self:
        """Return a view of these rows without the first `num_blocks` blocks of each table. Never `update` the view."""
        view = copy(self)
        view.tables = self.tables[:, :, num_blocks:]
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

    @property
    def block_tables(self) -> torch.Tensor:
        """Return the first block table of each row, (rows, max_blocks)."""
        return self.tables[0]

    def find_slots(self, token_rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots (tables, T) of the tokens at these positions (T,) of the rows (T,)."""
        blocks = self.tables[:, token_rows, positions // self._block_size].long()
        return blocks * self._block_size + positions % self._block_size

    def set_spare(self, row: int, block: int) -> None:
        """Let all tokens of a row use one block."""
        self.tables[:, row] = self._to_device(block * self._parts)

    def list_adapters(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the adapters that these rows use, without 0 for none, ascending."""
        return sorted({self._adapters[row] for row in rows} - {0})

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's changes since the last step."""
        for admitted in plan.admitted:
            self._set_row(admitted)
        if plan.new_blocks:
            self._append_blocks(plan.new_blocks)
        for row, first, blocks in plan.new_window_blocks:
            self._set_blocks(self._windowed, row, first, blocks)
        begin = plan.num_decodes
        for row, computed, drafts in zip(
            plan.rows[begin:], plan.num_computed_tokens[begin:], plan.drafts, strict=False
        ):
            self.token_ids[row, computed + 1 : computed + 1 + len(drafts)] = self._to_device(drafts)

    def _set_row(self, admitted: AdmittedRow) -> None:
        row = admitted.row
        self.token_ids[row, : len(admitted.token_ids)] = self._to_device(admitted.token_ids)
        self._num_blocks[row] = self._set_blocks(self._full, row, 0, admitted.block_ids)
        self._set_blocks(self._windowed, row, admitted.window_first, admitted.window_blocks)
        if self._adapters[row] != admitted.adapter:
            self._adapters[row] = admitted.adapter
            self.adapters[row] = admitted.adapter

    def _set_blocks(self, tables: slice, row: int, first: int, blocks: Sequence[int]) -> int:
        """Write a row's blocks from index `first` on, the tables' blocks of an index together. Returns their end."""
        if not blocks:
            return first
        number = tables.stop - tables.start
        numbers = np.array(blocks, dtype=np.int32).reshape(-1, number).T
        if self._has_parts:
            numbers = numbers * self._parts[tables]
        end: int = first + len(blocks) // number
        self.tables[tables, row, first:end] = self._to_device(numbers)
        return end

    def _append_blocks(self, new_blocks: Sequence[tuple[int, list[int]]]) -> None:
        places: list[tuple[int, int]] = []  # in the flattened tables, each with its number
        _, num_rows, width = self.tables.shape
        num_full, parts = self._full.stop, self._parts[:, 0].tolist()
        for row, blocks in new_blocks:
            first = self._num_blocks[row]
            for index, block in enumerate(blocks):
                column, table = divmod(index, num_full)
                places.append(((table * num_rows + row) * width + first + column, block * parts[table]))
            self._num_blocks[row] = first + len(blocks) // num_full
        place_of, numbers = self._to_device(places).unbind(1)
        self.tables.view(-1)[place_of] = numbers

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write sampled tokens to the rows. All arguments are (samples,).

        -1 (no token) is written as 0; its request ends in an error.
        """
        self.token_ids[rows, positions] = token_ids.clamp_min(0).int()

    def _to_device(self, values: Sequence[int] | Sequence[tuple[int, ...]] | npt.NDArray[np.int32]) -> torch.Tensor:
        return to_device(np.ascontiguousarray(values, dtype=np.int32), self._device)
