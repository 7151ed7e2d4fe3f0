"""Packed tensors of a step: the right tokens at the right positions in the right slots."""

import numpy as np
import torch
from tests.engine.builders import make_state

from conveyor_engine.execution.batch import Batch, BatchBuilder
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import StepPlan

BLOCK_SIZE = 4


def builder() -> BatchBuilder:
    return BatchBuilder(max_num_seqs=4, max_blocks_per_seq=8, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def placed(prompt: list[int], row: int, blocks: list[int], computed: int = 0) -> RequestState:
    state = make_state(prompt)
    state.row, state.block_table, state.num_computed_tokens = row, blocks, computed
    return state


def plan_of(*decodes: RequestState, prefills: list[tuple[RequestState, int]]) -> StepPlan:
    return StepPlan(list(decodes), prefills, num_tokens=len(decodes) + sum(n for _, n in prefills))


def mixed() -> Batch:
    """A decode at position 5, a chunk at 2..4 that ends its prompt, one at 0..1 that does not."""
    decode = placed([10, 11, 12, 13, 14, 15], 2, [7, 3], computed=5)
    ends = placed([20, 21, 22, 23, 24], 0, [1, 5], computed=2)
    goes_on = placed([30, 31, 32, 33], 1, [2])
    return builder().build(plan_of(decode, prefills=[(ends, 3), (goes_on, 2)]))


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
    assert metadata.block_tables.is_contiguous()
    assert np.array_equal(metadata.seq_lens_host, metadata.seq_lens.numpy())


def test_only_requests_whose_last_token_is_computed_sample() -> None:
    assert mixed().sample_rows.tolist() == [0, 3]


def test_a_block_that_comes_later_is_seen() -> None:
    batches, state = builder(), placed([1, 2, 3, 4], 0, [6])
    batches.build(plan_of(prefills=[(state, 4)]))
    state.num_computed_tokens = 4
    state.token_ids.append(5)
    state.block_table.append(2)
    assert batches.build(plan_of(state, prefills=[])).metadata.block_tables.tolist() == [[6, 2]]


def test_a_row_that_changes_hands_shows_its_new_owners_blocks() -> None:
    batches = builder()
    batches.build(plan_of(prefills=[(placed([1, 2, 3, 4, 5], 0, [6, 2]), 5)]))
    batch = batches.build(plan_of(prefills=[(placed([1, 2, 3, 4, 5], 0, [4, 1]), 5)]))
    assert batch.metadata.block_tables.tolist() == [[4, 1]]


def test_a_request_that_comes_back_to_its_row_shows_its_new_blocks() -> None:
    batches, state = builder(), placed([1, 2, 3, 4, 5], 0, [6, 2])
    batches.build(plan_of(prefills=[(state, 5)]))
    state.block_table = [0, 3]
    assert batches.build(plan_of(prefills=[(state, 5)])).metadata.block_tables.tolist() == [[0, 3]]
