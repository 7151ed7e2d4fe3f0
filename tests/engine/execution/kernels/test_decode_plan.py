"""Checks the shares of decodes: each key once, at most as many programs as launched, and long rows divided."""

from itertools import pairwise

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, ON_DEVICE

from conveyor_engine.execution.kernels import decode_plan
from conveyor_engine.execution.kernels.decode_plan import KEYS_PER_PROGRAM, DecodePlan, plan_decodes

pytestmark = ON_DEVICE
ROWS_OF_ALL_LENGTHS = [1, 15, 16, 17, 255, 256, 257, 300, 1000, 4097]
Share = tuple[int, int]


def plan(lengths: list[int], *, window: int | None = None, processors: int = 12, kv_heads: int = 3) -> DecodePlan:
    return plan_decodes(
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        num_heads=6,
        num_kv_heads=kv_heads,
        value_dim=8,
        sliding_window=window,
        num_processors=processors,
    )


def shares_of(made: DecodePlan, lengths: list[int]) -> list[list[Share]]:
    """Return the keys of each row's programs, in order. Checks what all programs are told about their row."""
    shares: list[list[Share]] = [[] for _ in lengths]
    for program, (row, seq_len, begin, end, first, count) in enumerate(made.work.T.tolist()):
        if row >= 0:
            assert (seq_len, first) == (lengths[row], program - len(shares[row]))
            shares[row].append((begin, end))
            assert len(shares[row]) <= count
    assert [len(row) for row in shares] == [made.work[5][made.work[0] == row][0] for row in range(len(lengths))]
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7, 700])
@pytest.mark.parametrize(
    "lengths",
    [[1], [30_000], ROWS_OF_ALL_LENGTHS, pytest.param([*range(1, 67)], marks=pytest.mark.slow)],
    ids=len,
)
def test_each_key_that_a_row_sees_is_in_one_share(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_plan, "_ROWS_AT_ONCE", 64)  # so that 66 rows are read in two passes
    for length, shares in zip(lengths, shares_of(plan(lengths, window=window), lengths), strict=True):
        assert shares[0][0] == max(0, length - (window or length))
        assert shares[-1][1] == length
        assert all(end == begin for (_, end), (begin, _) in pairwise(shares))
        assert all(begin < end for begin, end in shares)


@pytest.mark.slow
def test_a_row_that_is_much_longer_than_the_others_is_read_by_many_programs() -> None:
    lengths = [800] * 20 + [32_000]
    shares = shares_of(plan(lengths, processors=132, kv_heads=8), lengths)
    assert {len(row) for row in shares[:20]} == {3}
    assert len(shares[20]) == decode_plan._MOST_SHARES


@pytest.mark.slow
def test_rows_that_fill_the_gpu_are_not_split_and_a_lone_one_is_down_to_the_least_share() -> None:
    assert {len(row) for row in shares_of(plan([4096] * 256, processors=132, kv_heads=8), [4096] * 256)} == {1}
    (shares,) = shares_of(plan([1024], processors=132, kv_heads=8), [1024])
    assert [end - begin for begin, end in shares] == [KEYS_PER_PROGRAM] * 8


@pytest.mark.parametrize("num_rows", [1, 2, 8])
def test_few_rows_launch_no_program_that_no_length_can_use(num_rows: int) -> None:
    made = plan([100_000] * num_rows, processors=132, kv_heads=8)
    assert made.work.shape[1] == min(decode_plan._MOST_SHARES * num_rows, num_rows + 132)
    assert {len(row) for row in shares_of(made, [100_000] * num_rows)} <= {16, 17, 32}


@pytest.mark.parametrize("lengths", [[0], [0, 0, 0], [5, 300, 0, 0], [0, 4000, 0, 7]], ids=str)
def test_a_row_without_tokens_has_no_program(lengths: list[int]) -> None:
    made = plan(lengths)
    programs = [(row, begin, end) for row, _, begin, end, *_ in made.work.T.tolist() if row >= 0]
    for row, length in enumerate(lengths):
        shares = [(begin, end) for of, begin, end in programs if of == row]
        assert sum(end - begin for begin, end in shares) == length
        assert all(begin < end for begin, end in shares)


def test_nobody_has_arrived_yet() -> None:
    assert plan([3, 4, 5]).arrived.tolist() == [[0, 0, 0]] * 3
