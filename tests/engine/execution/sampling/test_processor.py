"""Tests the pipeline: a processor changes only the rows that use it, in its order, and costs other rows nothing."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from conveyor_engine.execution.sampling.processor import ALWAYS, Int64, LogitProcessor, Pipeline, Samples
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.step import RowSampling

CPU = torch.device("cpu")
ROWS, VOCABULARY = 4, 8
GREEDY = SamplingParams(temperature=0.0)


class Bias:
    """Adds to the logit of one token in each row with seed 1, at positions before a limit."""

    changes_best = True

    def __init__(self, token_id: int, before: int = ALWAYS) -> None:
        self._token_id, self._before = token_id, before
        self._bias = torch.zeros(ROWS, VOCABULARY)
        self.calls: list[list[int]] = []

    def set_row(self, row: int, sampling: RowSampling) -> int:
        self._bias[row] = 0.0
        self._bias[row, self._token_id] = 10.0
        return self._before if sampling.seed == 1 else 0

    def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
        self.calls.append(users.tolist())
        entries, biased = samples.select(users)
        logits[entries] += self._bias[biased.device_rows]


def make_pipeline(processors: Sequence[LogitProcessor], *rows: RowSampling) -> Pipeline:
    pipeline = Pipeline(processors, ROWS)
    for number, sampling in enumerate(rows):
        pipeline.set_row(number, sampling)
    return pipeline


def find_best(pipeline: Pipeline, *rows: int, position: int = 4) -> list[int]:
    """Return the best tokens of these rows, from logits in which token 3 is the best."""
    logits = torch.zeros(len(rows), VOCABULARY)
    logits[:, 3] = 1.0
    samples = Samples.of(np.array(rows), np.full(len(rows), position), CPU)
    processed = pipeline.apply(logits, samples, in_place=False)
    assert (processed is not logits) == pipeline.is_used(samples)
    assert (logits.argmax(-1) == 3).all(), "the model's logits are left alone"
    tokens: list[int] = processed.argmax(-1).tolist()
    return tokens


def test_a_processor_changes_the_rows_that_use_it_and_no_others() -> None:
    bias = Bias(token_id=5)
    pipeline = make_pipeline([bias], *(RowSampling(GREEDY, seed) for seed in (0, 1, 0, 1)))
    assert find_best(pipeline, 3, 0, 1, 2) == [5, 3, 5, 3]
    assert bias.calls == [[0, 2]]


def test_a_processor_is_skipped_when_no_row_of_the_step_uses_it() -> None:
    bias = Bias(token_id=5)
    pipeline = make_pipeline([bias], *(RowSampling(GREEDY, seed) for seed in (0, 1, 0, 1)))
    assert find_best(pipeline, 0, 2) == [3, 3]
    assert bias.calls == []


def test_a_processor_is_skipped_from_the_position_on_that_the_row_named() -> None:
    bias = Bias(token_id=5, before=6)
    pipeline = make_pipeline([bias], RowSampling(GREEDY, 1))
    assert [find_best(pipeline, 0, position=position) for position in (4, 5, 6)] == [[5], [5], [3]]
    assert len(bias.calls) == 2


def test_a_row_that_changes_hands_is_its_new_owners() -> None:
    bias = Bias(token_id=5)
    pipeline = make_pipeline([bias], RowSampling(GREEDY, 1))
    pipeline.set_row(0, RowSampling(GREEDY, 0))
    assert find_best(pipeline, 0) == [3]
    assert bias.calls == []


@pytest.mark.parametrize("order", [(5, 6), (6, 5)])
def test_processors_act_in_their_order(order: tuple[int, int]) -> None:
    class Only(Bias):
        def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
            logits[users] = self._bias[samples.device_rows[users]]

    pipeline = make_pipeline([Only(token_id) for token_id in order], RowSampling(GREEDY, 1))
    assert find_best(pipeline, 0) == [order[-1]]


@pytest.mark.parametrize("in_place", [False, True])
def test_logits_are_changed_in_place_only_if_they_may_be_and_are_float32(in_place: bool) -> None:
    pipeline = make_pipeline([Bias(token_id=5)], RowSampling(GREEDY, 1))
    samples = Samples.of(np.array([0]), np.array([4]), CPU)
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(1, VOCABULARY, dtype=dtype)
        processed = pipeline.apply(logits, samples, in_place=in_place)
        assert processed.dtype == torch.float32
        assert (processed is logits) == (in_place and dtype == torch.float32)
