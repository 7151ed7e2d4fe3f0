"""Checks the packed tensors of a step: the right tokens at the right positions in the right slots."""

import numpy as np
import torch

from conveyor_engine.execution.batch import Batch, build_batch, only_sampled
from conveyor_engine.execution.rows import Rows
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.step import AdmittedRow, RowSampling, StepPlan

BLOCK_SIZE = 4
SAMPLING = RowSampling(SamplingParams(), 0)


def make_rows() -> Rows:
    return Rows(max_num_seqs=4, max_model_len=32, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def build(
    rows: Rows,
    *work: tuple[int, int, int, int],
    admitted: list[AdmittedRow] | None = None,
    new_blocks: list[tuple[int, list[int]]] | None = None,
) -> Batch:
    """Build a batch. `work`: (row, computed before, tokens now, logits) for each; rows with one token are decodes."""
    row_ids, computed, num_tokens, num_logits = (list(column) for column in zip(*work, strict=True))
    plan = StepPlan(0, admitted or [], new_blocks or [], row_ids, computed, num_tokens, num_logits, num_tokens.count(1))
    rows.update(plan)
    return build_batch(plan, rows, BLOCK_SIZE)


def mixed(rows: Rows | None = None) -> Batch:
    """Return a decode at position 5, a chunk at 2..4 that ends its prompt, and one at 0..1 that does not."""
    admitted = [
        AdmittedRow.of(2, [10, 11, 12, 13, 14, 15], [7, 3], SAMPLING),
        AdmittedRow.of(0, [20, 21, 22, 23, 24], [1, 5], SAMPLING),
        AdmittedRow.of(1, [30, 31, 32, 33], [2], SAMPLING),
    ]
    return build(rows or make_rows(), (2, 5, 1, 1), (0, 2, 3, 1), (1, 0, 2, 0), admitted=admitted)


def test_tokens_and_positions_are_packed_decodes_first() -> None:
    batch = mixed()
    assert batch.input_ids.tolist() == [[15, 22, 23, 24, 30, 31]]
    assert batch.position_ids.tolist() == [[5, 2, 3, 4, 0, 1]]
    assert batch.input_ids.dtype == batch.position_ids.dtype == torch.int64


def test_every_token_has_the_slot_of_its_block() -> None:
    assert mixed().metadata.slot_mapping.tolist() == [3 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 5 * 4, 2 * 4, 2 * 4 + 1]


def test_the_metadata_describes_the_rows() -> None:
    metadata = mixed().metadata
    assert metadata.query_start_loc.tolist() == [0, 1, 4, 6]
    assert metadata.seq_lens.tolist() == [6, 5, 2]
    assert metadata.block_tables[:, :2].tolist()[:2] == [[7, 3], [1, 5]]
    assert metadata.block_tables[2, 0] == 2
    assert (metadata.num_seqs, metadata.num_decodes, metadata.num_tokens) == (3, 1, 6)
    assert metadata.query_start_loc.dtype == metadata.seq_lens.dtype == metadata.block_tables.dtype == torch.int32
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.block_tables.is_contiguous()
    assert np.array_equal(metadata.seq_lens_host, metadata.seq_lens.numpy())


def test_only_rows_with_logits_sample_at_the_position_after_their_last_token() -> None:
    batch = mixed()
    assert batch.logit_indices.tolist() == [0, 3]
    assert (batch.samples.rows.tolist(), batch.samples.positions.tolist()) == ([2, 0], [6, 5])


def test_a_row_may_have_several_logits_and_they_follow_its_last_tokens() -> None:
    admitted = [AdmittedRow.of(1, [5, 6, 7, 8], [0], SAMPLING), AdmittedRow.of(3, [9, 9], [1], SAMPLING)]
    batch = build(make_rows(), (1, 1, 3, 2), (3, 0, 2, 1), admitted=admitted)
    assert batch.logit_indices.tolist() == [1, 2, 4]
    assert (batch.samples.rows.tolist(), batch.samples.positions.tolist()) == ([1, 1, 3], [3, 4, 2])


def test_the_last_layer_attends_for_sampled_tokens_each_with_all_before_it() -> None:
    rows = make_rows()
    last = only_sampled(5, mixed(rows), rows)
    assert last is not None
    assert (last.layer, last.tokens.tolist()) == (5, [0, 3])
    metadata = last.metadata
    assert metadata.query_start_loc.tolist() == metadata.query_start_loc_host.tolist() == [0, 1, 2]
    assert metadata.seq_lens.tolist() == metadata.seq_lens_host.tolist() == [6, 5]
    assert metadata.block_tables.tolist() == [[7, 3], [1, 5]]
    assert metadata.slot_mapping.tolist() == [3 * 4 + 1, 5 * 4]
    assert (metadata.num_seqs, metadata.num_decodes, metadata.num_tokens) == (2, 2, 2)
    assert metadata.query_start_loc.dtype == metadata.seq_lens.dtype == metadata.block_tables.dtype == torch.int32


def test_where_every_token_is_sampled_the_last_layer_is_like_the_others() -> None:
    rows = make_rows()
    assert only_sampled(5, build(rows, (0, 0, 1, 1), admitted=[AdmittedRow.of(0, [1], [4], SAMPLING)]), rows) is None


def test_a_step_that_samples_nothing_has_no_logits() -> None:
    rows = make_rows()
    batch = build(rows, (0, 0, 2, 0), admitted=[AdmittedRow.of(0, [1, 2, 3], [4], SAMPLING)])
    assert batch.logit_indices.tolist() == batch.samples.rows.tolist() == []
    last = only_sampled(5, batch, rows)
    assert last is not None
    assert last.metadata.num_seqs == 0


def test_a_block_that_comes_later_is_seen() -> None:
    rows = make_rows()
    build(rows, (0, 0, 4, 1), admitted=[AdmittedRow.of(0, [1, 2, 3, 4], [6], SAMPLING)])
    batch = build(rows, (0, 4, 1, 1), new_blocks=[(0, [2])])
    assert batch.metadata.block_tables.tolist() == [[6, 2]]
    batch = build(rows, (0, 8, 1, 1), new_blocks=[(0, [3, 1])])
    assert rows.block_tables[0, :4].tolist() == [6, 2, 3, 1]
    assert batch.metadata.block_tables.tolist() == [[6, 2, 3]]


def test_a_sampled_token_is_the_next_steps_input_without_a_word_from_the_plan() -> None:
    rows = make_rows()
    samples = build(rows, (3, 0, 2, 1), admitted=[AdmittedRow.of(3, [1, 2], [6], SAMPLING)]).samples
    rows.append(samples.device_rows, samples.device_positions, torch.tensor([77]))
    assert build(rows, (3, 2, 1, 1)).input_ids.tolist() == [[77]]


def test_what_is_no_token_is_never_an_input() -> None:
    rows = make_rows()
    rows.append(torch.tensor([0]), torch.tensor([2]), torch.tensor([-1]))
    assert build(rows, (0, 2, 1, 1)).input_ids.tolist() == [[0]]


def test_a_row_that_changes_hands_shows_its_new_owner() -> None:
    rows = make_rows()
    build(rows, (0, 0, 5, 1), admitted=[AdmittedRow.of(0, [1, 2, 3, 4, 5], [6, 2], SAMPLING)])
    batch = build(rows, (0, 0, 2, 1), admitted=[AdmittedRow.of(0, [8, 9], [4], SAMPLING)])
    assert batch.metadata.block_tables.tolist() == [[4]]
    assert batch.input_ids.tolist() == [[8, 9]]
