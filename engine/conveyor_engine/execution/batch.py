"""Turns a step plan into packed tensors: token ids, positions, slots, block tables.

Used by `model_runner` once per step. Everything is built in numpy on the host, per step rather than per request
where it can be, and copied to the device array by array. Knows plans and metadata, not models.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.attention.backend import AttentionMetadata
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import StepPlan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """The inputs of one forward over T packed tokens."""

    input_ids: torch.Tensor  # int64 (1, T)
    position_ids: torch.Tensor  # int64 (1, T)
    sample_rows: torch.Tensor  # int64 (num_samples,), indices into T, in the order of StepPlan.sampling()
    metadata: AttentionMetadata


class BatchBuilder:
    """Builds batches; keeps the block tables of admitted requests as one array between steps."""

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables: Int32 = np.zeros((max_num_seqs, max_blocks_per_seq), dtype=np.int32)
        self._known: list[list[int] | None] = [None] * max_num_seqs  # whose table the row holds ...
        self._known_blocks = [0] * max_num_seqs  # ... and how much of it

    def build(self, plan: StepPlan) -> Batch:
        """The packed batch of a plan: decodes, then prefills."""
        requests = plan.decodes + [request for request, _ in plan.prefills]
        num_seqs, num_decodes = len(requests), len(plan.decodes)
        lengths = np.array([1] * num_decodes + [n for _, n in plan.prefills], dtype=np.int32)
        computed = np.array([r.num_computed_tokens for r in requests], dtype=np.int32)
        seq_lens = computed + lengths
        starts = np.zeros(num_seqs + 1, dtype=np.int32)
        np.cumsum(lengths, out=starts[1:])
        rows = np.repeat(np.arange(num_seqs), lengths)
        positions = np.arange(plan.num_tokens) - starts[:-1][rows] + computed[rows]
        tables = self._block_tables(requests, seq_lens)
        slots = tables[rows, positions // self._block_size].astype(np.int64) * self._block_size
        slots += positions % self._block_size
        metadata = AttentionMetadata(
            query_start_loc=self._to_device(starts),
            seq_lens=self._to_device(seq_lens),
            block_tables=self._to_device(tables),
            slot_mapping=self._to_device(slots),
            num_seqs=num_seqs,
            num_decodes=num_decodes,
            num_tokens=plan.num_tokens,
            query_start_loc_host=starts,
            seq_lens_host=seq_lens,
        )
        return Batch(
            input_ids=self._to_device(_token_ids(plan))[None],
            position_ids=self._to_device(positions)[None],
            sample_rows=self._to_device(_sample_rows(plan, starts)),
            metadata=metadata,
        )

    def _block_tables(self, requests: list[RequestState], seq_lens: Int32) -> Int32:
        """(num_seqs, as wide as the longest needs), a copy; into the array it is of, only new blocks are written."""
        for request in requests:
            row, table = request.row, request.block_table
            if self._known[row] is not table:  # admitted since: each admission makes a new list
                self._known[row] = table
                self._known_blocks[row] = 0
            known = self._known_blocks[row]
            if known != len(table):
                self._tables[row, known : len(table)] = table[known:]
                self._known_blocks[row] = len(table)
        width = -(-int(seq_lens.max(initial=1)) // self._block_size)
        return self._tables[[request.row for request in requests], :width]

    def _to_device(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _token_ids(plan: StepPlan) -> Int64:
    parts = [np.array([r.token_ids[-1] for r in plan.decodes], dtype=np.int64)]
    for request, num_tokens in plan.prefills:
        start = request.num_computed_tokens
        parts.append(np.array(request.token_ids[start : start + num_tokens], dtype=np.int64))
    return np.concatenate(parts)


def _sample_rows(plan: StepPlan, starts: Int32) -> Int64:
    """The last token of each request that samples."""
    num_decodes = len(plan.decodes)
    complete = np.array([n == r.num_pending_tokens for r, n in plan.prefills], dtype=np.bool_)
    prefill_ends = starts[num_decodes + 1 :][complete] - 1
    return np.concatenate([np.arange(num_decodes), prefill_ends]).astype(np.int64)
