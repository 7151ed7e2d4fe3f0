"""Tests an external processor: it changes only the rows that use it, in its order, and costs other rows nothing."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from conveyor_engine.execution.sampling.logit_processors import build_processors
from conveyor_engine.execution.sampling.processor import ALWAYS, Int64, LogitProcessor, Samples
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.wire.request import SamplingParams
from conveyor_engine.wire.step import RowSampling

CPU = torch.device("cpu")
ROWS, VOCABULARY = 4, 8
TOKENS = torch.zeros((ROWS, 64), dtype=torch.int32)
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


def make_sampler(processors: Sequence[LogitProcessor], *rows: RowSampling) -> Sampler:
    sampler = Sampler(ROWS, VOCABULARY, CPU, TOKENS, processors)
    for number, sampling in enumerate(rows):
        sampler.set_row(number, sampling)
    return sampler


def sample(sampler: Sampler, *rows: int, position: int = 4) -> list[int]:
    """Return the tokens of these rows, from logits in which token 3 is the best."""
    logits = torch.zeros(len(rows), VOCABULARY)
    logits[:, 3] = 1.0
    samples = Samples.of(np.array(rows), np.full(len(rows), position), CPU)
    tokens: list[int] = sampler.sample(logits, samples).token_ids.tolist()
    assert (logits.argmax(-1) == 3).all(), "the model's logits are left alone"
    return tokens


def test_a_processor_changes_the_rows_that_use_it_and_no_others() -> None:
    bias = Bias(token_id=5)
    sampler = make_sampler([bias], *(RowSampling(GREEDY, seed) for seed in (0, 1, 0, 1)))
    assert sample(sampler, 3, 0, 1, 2) == [5, 3, 5, 3]
    assert bias.calls == [[0, 2]]


def test_a_processor_is_skipped_when_no_row_of_the_step_uses_it() -> None:
    bias = Bias(token_id=5)
    sampler = make_sampler([bias], *(RowSampling(GREEDY, seed) for seed in (0, 1, 0, 1)))
    assert sample(sampler, 0, 2) == [3, 3]
    assert bias.calls == []


def test_a_processor_is_skipped_from_the_position_on_that_the_row_named() -> None:
    bias = Bias(token_id=5, before=6)
    sampler = make_sampler([bias], RowSampling(GREEDY, 1))
    assert [sample(sampler, 0, position=position) for position in (4, 5, 6)] == [[5], [5], [3]]
    assert len(bias.calls) == 2


def test_a_row_that_changes_hands_is_its_new_owners() -> None:
    bias = Bias(token_id=5)
    sampler = make_sampler([bias], RowSampling(GREEDY, 1))
    sampler.set_row(0, RowSampling(GREEDY, 0))
    assert sample(sampler, 0) == [3]
    assert bias.calls == []


@pytest.mark.parametrize("order", [(5, 6), (6, 5)])
def test_processors_act_in_their_order(order: tuple[int, int]) -> None:
    class Only(Bias):
        def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
            logits[users] = self._bias[samples.device_rows[users]]

    sampler = make_sampler([Only(token_id) for token_id in order], RowSampling(GREEDY, 1))
    assert sample(sampler, 0) == [order[-1]]


def test_a_processor_that_keeps_the_best_spares_rows_that_take_the_best() -> None:
    """The processor gets each row's logits relative to the largest one, in float32."""

    class OnlyTheBest(Bias):
        changes_best = False

        def apply(self, logits: torch.Tensor, samples: Samples, users: Int64) -> None:
            self.calls.append(samples.device_rows[users].tolist())
            assert (logits.dtype, logits.amax(-1).tolist()) == (torch.float32, [0.0] * len(logits))
            logits[users] = logits[users].masked_fill(logits[users] < 0, float("-inf"))

    only = OnlyTheBest(token_id=0)
    draws = SamplingParams(temperature=1.0)
    rows = [RowSampling(GREEDY, 1), RowSampling(draws, 1), RowSampling(draws, 2), RowSampling(GREEDY, 1)]
    sampler = make_sampler([*build_processors(ROWS, CPU, TOKENS), only], *rows)
    seen = {tuple(sample(sampler, 0, 1, 2, 3, position=position)) for position in range(40)}
    assert {tokens[:2] + tokens[3:] for tokens in seen} == {(3, 3, 3)}
    assert len({tokens[2] for tokens in seen}) > 3
    assert only.calls == [[1]] * 40
