"""Graphs for steps in which every row computes one token and samples one. Used by `step_graphs`.

The host sends only the row, the position and the next position for each token. All other inputs are gathered from
`rows` on the device. Up to 256 rows, the sizes are those of nano-vllm. vLLM captures multiples of 8 instead.
"""

import numpy as np
import torch

from conveyor_engine.execution.attention.backend import AttentionBackend
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.batch import with_tables
from conveyor_engine.execution.graphs.step_graphs import Forward
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.states import States
from conveyor_engine.execution.transfer import copy_into
from conveyor_engine.wire.step import StepPlan

_NO_LENGTHS = np.zeros(0, dtype=np.int32)  # lengths are unknown in a graph; taking their maximum raises an error


def batch_sizes(max_num_seqs: int) -> list[int]:
    """Return the numbers of rows to capture, ascending.

    Matrix products of 1 to 16 rows cost about the same. For more rows the cost grows slowly.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def is_decode_only(plan: StepPlan) -> bool:
    """Return whether every row of the step computes one token and samples one."""
    return 0 < len(plan.rows) == plan.num_decodes == plan.num_logits.count(1)


class DecodeSteps:
    """A `StepKind` whose sizes are numbers of rows."""

    name = "decodes"

    def __init__(
        self,
        rows: Rows,
        backend: AttentionBackend,
        forward: Forward,
        largest: int | None = None,
        states: States | None = None,
    ) -> None:
        """rows: the last row is for padding. largest: maximum rows of a captured step; None: no limit; 0: no graphs.

        states: of all rows; None: the model has none.
        """
        self._rows, self._backend, self._forward, self._states = rows, backend, forward, states
        self._spare_row = len(rows.block_tables) - 1
        largest = self._spare_row if largest is None else largest
        self.sizes = batch_sizes(largest) if largest else []
        device = rows.block_tables.device
        self._inputs = torch.zeros(3 * self._spare_row, dtype=torch.int64, device=device)
        self._starts = np.arange(self._spare_row + 1, dtype=np.int32)
        self._device_starts = torch.arange(self._spare_row + 1, dtype=torch.int32, device=device)

    def size_of(self, plan: StepPlan) -> int | None:
        return len(plan.rows) if is_decode_only(plan) else None

    def fill(self, plan: StepPlan | None, size: int) -> Samples:
        number = 0 if plan is None else len(plan.rows)
        host = np.zeros((3, size), dtype=np.int64)  # rows, positions, and the positions after them
        host[0] = self._spare_row
        if plan is not None:
            host[0, :number], host[1, :number] = plan.rows, plan.num_computed_tokens
        host[2] = host[1] + 1
        device = self._inputs_of(size)
        copy_into(device, host)
        return Samples(host[0, :number], host[2, :number], device[0, :number], device[2, :number])

    def _inputs_of(self, size: int) -> torch.Tensor:
        return self._inputs[: 3 * size].view(3, size)

    def compute(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, positions, ends = self._inputs_of(size)
        metadata = with_tables(
            self._rows.tables[:, rows],
            self._rows.find_slots(rows, positions),
            query_start_loc=self._device_starts[: size + 1],
            seq_lens=ends.int(),
            num_seqs=size,
            num_decodes=size,
            num_tokens=size,
            query_start_loc_host=self._starts[: size + 1],
            seq_lens_host=_NO_LENGTHS,
        )
        input_ids = self._rows.token_ids[rows, positions].long()
        paged = PagedStep(self._backend, metadata, token_rows=rows, states=self._states)
        logits = self._forward(input_ids[None], positions[None], 0, paged)
        return logits, rows, ends
