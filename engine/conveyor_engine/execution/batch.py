"""Turns a step plan into packed tensors: token ids, positions, slots and block tables.

Used by `tasks.generate`, `tasks.transcribe` and `graphs.mixed`. What depends only on the numbers in the plan is built
in numpy on the host and copied array by array. Tokens and block tables are gathered on the device, from `rows`. Knows
neither requests nor models.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.attention.backend import AttentionMetadata, LastLayer
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.transfer import to_device
from conveyor_engine.wire.step import StepPlan

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class Batch:
    """The inputs of one forward pass over T packed tokens."""

    input_ids: torch.Tensor  # int64 (1, T)
    position_ids: torch.Tensor  # int64 (1, T)
    token_rows: torch.Tensor  # int64 (T,)
    logit_indices: torch.Tensor  # int64 (samples,), indices into T
    samples: Samples
    metadata: AttentionMetadata


@dataclass(slots=True)
class Layout:
    """A plan's tokens, packed one row after another."""

    rows: Int64  # (rows,)
    seq_lens: Int32  # (rows,): length of the context including this step's tokens
    starts: Int32  # (rows + 1,): each row's first token, and the total
    token_rows: Int64  # (T,)
    positions: Int64  # (T,)
    logit_indices: Int64  # (entries,): the tokens that get logits
    sampled_rows: Int64  # (entries,)
    ends: Int64  # (entries,): positions of the tokens to be sampled

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


def lay_out(plan: StepPlan) -> Layout:
    """Compute the parts of a batch that depend only on the numbers in the plan."""
    rows = np.array(plan.rows, dtype=np.int64)
    lengths = np.array(plan.num_tokens, dtype=np.int32)
    computed = np.array(plan.num_computed_tokens, dtype=np.int32)
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.arange(int(starts[-1])) + np.repeat(computed - starts[:-1], lengths)
    logit_indices = _logit_indices(starts, np.array(plan.num_logits, dtype=np.int64))
    return Layout(
        rows=rows,
        seq_lens=computed + lengths,
        starts=starts,
        token_rows=np.repeat(rows, lengths),
        positions=positions,
        logit_indices=logit_indices,
        sampled_rows=np.repeat(rows, plan.num_logits),
        ends=positions[logit_indices] + 1,
    )


def build_batch(plan: StepPlan, rows: Rows, block_size: int) -> Batch:
    """Build the packed batch for a plan. `rows` must have applied the plan's changes before."""
    device, layout = rows.token_ids.device, lay_out(plan)
    token_rows = to_device(layout.token_rows, device)
    position_ids = to_device(layout.positions, device)
    width = -(-int(layout.seq_lens.max()) // block_size)
    return Batch(
        input_ids=rows.token_ids[token_rows, position_ids].long()[None],
        position_ids=position_ids[None],
        token_rows=token_rows,
        logit_indices=to_device(layout.logit_indices, device),
        samples=Samples.of(layout.sampled_rows, layout.ends, device),
        metadata=with_tables(
            rows.tables[:, to_device(layout.rows, device), :width],
            rows.find_slots(token_rows, position_ids),
            query_start_loc=to_device(layout.starts, device),
            seq_lens=to_device(layout.seq_lens, device),
            num_seqs=len(layout.rows),
            num_decodes=plan.num_decodes,
            num_tokens=layout.num_tokens,
            query_start_loc_host=layout.starts,
            seq_lens_host=layout.seq_lens,
        ),
    )


def only_sampled(layer: int, batch: Batch, rows: Rows) -> LastLayer | None:
    """Return the tokens for which the last layer must attend; None if these are all tokens of the batch."""
    samples, device = batch.samples, rows.token_ids.device
    number = len(samples.rows)
    if number == batch.metadata.num_tokens:
        return None
    starts = np.arange(number + 1, dtype=np.int32)
    return LastLayer(
        layer,
        batch.logit_indices,
        with_tables(
            rows.tables[:, samples.device_rows, : batch.metadata.block_tables.shape[1]],
            rows.find_slots(samples.device_rows, samples.device_positions - 1),
            query_start_loc=to_device(starts, device),
            seq_lens=samples.device_positions.int(),
            num_seqs=number,
            num_decodes=number,
            num_tokens=number,
            query_start_loc_host=starts,
            seq_lens_host=samples.positions.astype(np.int32),
        ),
    )


def with_tables(tables: torch.Tensor, slots: torch.Tensor, **common: Any) -> AttentionMetadata:
    """Build a step's metadata from its block tables (tables, rows, blocks) and slots (tables, T)."""
    metadata = AttentionMetadata(block_tables=tables[0], slot_mapping=slots[0], **common)
    if (number := tables.shape[0]) > 1:
        metadata.others = tuple(
            replace(metadata, block_tables=tables[table], slot_mapping=slots[table]) for table in range(1, number)
        )
    return metadata


def _logit_indices(starts: Int32, num_logits: Int64) -> Int64:
    """Return the indices of the last `num_logits` tokens of each row within the packed tokens."""
    ends = np.cumsum(num_logits)
    return np.arange(ends[-1]) + np.repeat(starts[1:] - ends, num_logits)
