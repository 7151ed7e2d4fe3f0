"""Compares the processors with transformers' own, or with a plain definition of vLLM's if transformers has none."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.builders import make_state
from tests.engine.execution.sampling.test_sampler import Operations
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from conveyor_engine.execution.sampling import penalties
from conveyor_engine.execution.sampling.logit_processors import build_processors
from conveyor_engine.execution.sampling.processor import Pipeline, Samples
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.wire.step import NOTHING_ALLOWED

CPU = torch.device("cpu")
ROWS, VOCABULARY, CONTEXT = 6, 50, 40
PROMPTS = [1, 4, 7, 10, 2, 30]  # tokens of each row's prompt ...
LENGTHS = [2, 4, 12, 33, 3, 39]  # ... and of all of its tokens
TOKEN_IDS = torch.randint(0, VOCABULARY // 4, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(1)).int()


def of_row(row: int, **params: Any) -> Any:
    return make_state(list(range(PROMPTS[row])), seed=row, **params).sampling


def make_samples(rows: list[int]) -> Samples:
    return Samples.of(np.array(rows), np.array(LENGTHS)[rows], CPU)


def make_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(2)).mul(4).to(dtype)


def process(params: dict[int, dict[str, Any]], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of all rows after the processors that may change the best token. Some rows have parameters."""
    processors = [each for each in build_processors(ROWS, CPU, TOKEN_IDS) if each.changes_best]
    pipeline = Pipeline(processors, ROWS)
    for row in range(ROWS):
        pipeline.set_row(row, of_row(row, **params.get(row, {})))
    return pipeline.apply(logits, make_samples(list(range(ROWS))), in_place=False)


def tokens_of(row: int, begin: int = 0) -> torch.Tensor:
    return TOKEN_IDS[row : row + 1, begin : LENGTHS[row]].long()


def penalized(row: int, logits: torch.Tensor, presence: float, frequency: float) -> torch.Tensor:
    """Return vLLM's definition of the penalties, which counts only the output."""
    counts = torch.bincount(tokens_of(row, PROMPTS[row])[0], minlength=VOCABULARY)
    return logits - frequency * counts - presence * (counts > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_at_once", [1, 30, 2**20])
def test_penalties_are_those_of_transformers_and_vllm(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens_at_once: int
) -> None:
    monkeypatch.setattr(penalties, "TOKENS_AT_ONCE", tokens_at_once)
    params = {
        0: {"repetition_penalty": 1.3},
        2: {"presence_penalty": 0.7, "frequency_penalty": -0.3},
        3: {"frequency_penalty": 0.11, "repetition_penalty": 0.8},
        5: {"presence_penalty": -2.0},
    }
    logits = make_logits(dtype)
    found = process(params, logits)
    assert found.dtype == torch.float32
    for row in range(ROWS):
        expected = logits[row : row + 1].float()
        params_of_row = params.get(row, {})
        if "repetition_penalty" in params_of_row:
            expected = RepetitionPenaltyLogitsProcessor(params_of_row["repetition_penalty"])(tokens_of(row), expected)
        expected = penalized(
            row, expected, params_of_row.get("presence_penalty", 0), params_of_row.get("frequency_penalty", 0)
        )
        assert torch.allclose(found[row : row + 1], expected, atol=1e-6), row


def test_a_bias_and_bad_words_are_those_of_transformers() -> None:
    """Bad words count only in the output, as in vLLM. So transformers gets no prompt."""
    in_output = tokens_of(3, PROMPTS[3])[0].tolist()
    words = [[7], [*in_output[-2:], 9], [*in_output[-4:-2], 10], [*in_output[-5:], 11], [*in_output[-1:], 9]]
    bias = {(3,): 5.5, (49,): -100.0, (7,): 2.0}
    params = {3: {"bad_words": tuple(map(tuple, words)), "logit_bias": tuple((k[0], v) for k, v in bias.items())}}
    logits = make_logits()
    found = process({**params, 0: {"bad_words": ((4,),)}, 1: {"logit_bias": ((4, 1.0),)}}, logits)
    both = LogitsProcessorList([NoBadWordsLogitsProcessor(words), SequenceBiasLogitsProcessor(bias)])
    expected = both(torch.tensor([in_output]), logits[3:4].clone())
    assert torch.equal(found[3:4], expected)
    assert torch.isinf(found[3]).nonzero().squeeze(1).tolist() == [7, 9, 11]
    assert torch.isinf(found[0]).nonzero().squeeze(1).tolist() == [4]
    assert found[1, 4] == logits[1, 4] + 1


def test_bad_words_that_the_prompt_began_may_be_completed() -> None:
    begun = tokens_of(4, 0)[0].tolist()  # two prompt tokens, one output token
    logits = make_logits()
    found = process({4: {"bad_words": ((*begun, 20), (begun[2], 21))}}, logits)
    assert torch.isinf(found[4]).nonzero().squeeze(1).tolist() == [21]


def test_only_allowed_tokens_are_left_whatever_else_a_row_requests() -> None:
    logits = make_logits()
    found = process(
        {1: {"allowed_token_ids": (8, 9)}, 2: {"allowed_token_ids": (5, 6, 7), "logit_bias": ((6, 9),)}}, logits
    )
    assert torch.isfinite(found[1]).nonzero().squeeze(1).tolist() == [8, 9]
    assert found[2, [5, 6, 7]].tolist() == [logits[2, 5], logits[2, 6] + 9, logits[2, 7]]
    assert torch.isfinite(found).sum(-1).tolist() == [50, 2, 3, 50, 50, 50]


def test_rows_change_hands_with_all_that_they_request() -> None:
    processors = [each for each in build_processors(ROWS, CPU, TOKEN_IDS) if each.changes_best]
    pipeline = Pipeline(processors, ROWS)
    params_of_row = {"logit_bias": ((1, 5.0), (2, 6.0)), "bad_words": ((3,), (4, 5)), "allowed_token_ids": (1, 2, 9)}
    pipeline.set_row(0, of_row(0, **params_of_row, repetition_penalty=2.0))
    pipeline.set_row(0, of_row(0, logit_bias=((7, 1.0),)))
    pipeline.set_row(1, of_row(1, **params_of_row))
    logits = make_logits()
    found = pipeline.apply(logits, make_samples([0, 1]), in_place=False)
    assert (found[0] != logits[0]).nonzero().squeeze(1).tolist() == [7]
    assert torch.isfinite(found[1]).nonzero().squeeze(1).tolist() == [1, 2, 9]


@pytest.mark.parametrize("with_cut", [{}, {"top_k": 40}, {"top_p": 0.999}])
@pytest.mark.parametrize("min_p", [0.05, 0.5, 1.0])
def test_min_p_leaves_what_transformers_leaves(min_p: float, with_cut: dict[str, Any]) -> None:
    rows = 4000
    sampler = Sampler(rows, VOCABULARY, CPU, TOKEN_IDS)
    for row in range(rows):
        sampler.set_row(row, make_state(seed=row, min_p=min_p, temperature=2.0, **with_cut).sampling)
    logits = make_logits()[:1]
    samples = Samples.of(np.arange(rows), np.full(rows, 4), CPU)
    drawn = set(sampler.sample(logits.repeat(rows, 1), samples).token_ids.tolist())
    left = torch.isfinite(MinPLogitsWarper(min_p)(torch.zeros(1, 1), logits / 2.0)[0])
    assert drawn == set(left.nonzero().squeeze(1).tolist())


def test_a_row_whose_parameters_forbid_everything_says_so_and_spares_the_others() -> None:
    sampler = Sampler(ROWS, VOCABULARY, CPU, TOKEN_IDS)
    forbidding: list[dict[str, Any]] = [
        {"allowed_token_ids": (9,), "bad_words": ((9,),)},
        {"allowed_token_ids": (3,), "min_tokens": 2, "stop_token_ids": (3,), "temperature": 0},
        {"allowed_token_ids": (9,), "bad_words": ((8,),)},
    ]
    for row, params in enumerate(forbidding):
        sampler.set_row(row, make_state(seed=row, **params).sampling)
    samples = Samples.of(np.arange(3), np.full(3, 4), CPU)
    assert sampler.sample(make_logits()[:3], samples).token_ids.tolist() == [NOTHING_ALLOWED, NOTHING_ALLOWED, 9]


def count_operations(*params: dict[str, Any]) -> dict[str, int]:
    sampler = Sampler(len(params), VOCABULARY, CPU, TOKEN_IDS)
    for row, params_of_row in enumerate(params):
        sampler.set_row(row, make_state(seed=row, **params_of_row).sampling)
    samples = Samples.of(np.arange(len(params)), np.full(len(params), 4), CPU)
    logits = make_logits()[: len(params)]
    with Operations() as operations:
        sampler.sample(logits, samples)
    return dict(operations.counted)


ASKED: list[dict[str, Any]] = [
    {"presence_penalty": 1.0}, {"repetition_penalty": 1.1}, {"logit_bias": ((1, 1.0),)}, {"bad_words": ((1, 2),)},
    {"allowed_token_ids": (1, 2)},
]  # fmt: skip


@pytest.mark.parametrize("params_of_row", ASKED, ids=lambda params_of_row: next(iter(params_of_row)))
def test_a_step_without_users_costs_no_operation_more_after_one_with_users(params_of_row: dict[str, Any]) -> None:
    sampler = Sampler(2, VOCABULARY, CPU, TOKEN_IDS)
    for row in range(2):
        sampler.set_row(row, make_state(seed=row, **params_of_row).sampling)
    sampler.set_row(0, make_state(seed=0).sampling)
    logits, samples = make_logits()[:1], make_samples([0])
    with Operations() as operations:
        sampler.sample(logits, samples)
    assert dict(operations.counted) == count_operations({})


def test_min_p_alone_costs_no_operation_where_there_are_kernels() -> None:
    assert count_operations({"min_p": 0.1}) == count_operations({})


def test_more_users_are_no_more_operations() -> None:
    assert count_operations(*ASKED[:2]) == count_operations(*ASKED[:2], *ASKED[:2])
