"""Checks masks: every way of choosing chooses only allowed tokens, and the logits of other rows do not change."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.builders import make_state

from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.wire.step import RowMask

CPU = torch.device("cpu")
ROWS, VOCABULARY = 64, 384
NO_TOKENS = torch.zeros((0, 0), dtype=torch.int32)  # of rows without penalties
ALLOWED = (3, 200, 383)


def mask_of(row: int, *allowed: int) -> RowMask:
    bits = sum(1 << token_id for token_id in allowed)
    return RowMask(row, bits.to_bytes(VOCABULARY // 8 + 4, "little"))  # longer than the vocabulary, as some masks are


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.7}, {"min_tokens": 2}], ids=str
)
def test_a_masked_row_gets_an_allowed_token_and_the_others_are_left_alone(params: dict[str, Any]) -> None:
    sampler = Sampler(ROWS, VOCABULARY, CPU, NO_TOKENS)
    for row in range(ROWS):
        sampler.set_row(row, make_state(seed=row, logprobs=1, **params).sampling)
    logits = torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0))
    samples = Samples.of(np.arange(ROWS)[::-1].copy(), np.full(ROWS, 4), CPU)
    before = logits.clone()
    plain = sampler.sample(logits, samples)
    masked = sampler.sample(logits, samples, [mask_of(row, *ALLOWED) for row in range(0, ROWS, 2)])
    even = torch.from_numpy(samples.rows % 2 == 0)
    assert set(masked.token_ids[even].tolist()) <= set(ALLOWED)
    assert masked.token_ids[~even].equal(plain.token_ids[~even])
    assert logits.equal(before)


def test_log_probabilities_are_the_models_own() -> None:
    sampler = Sampler(1, VOCABULARY, CPU, NO_TOKENS)
    sampler.set_row(0, make_state(temperature=0, logprobs=0).sampling)
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    sampled = sampler.sample(logits, Samples.of(np.array([0]), np.array([4]), CPU), [mask_of(0, 7)])
    assert sampled.logprobs is not None
    assert sampled.token_ids.tolist() == [7]
    assert sampled.logprobs.chosen_values.item() == pytest.approx(logits.log_softmax(-1)[0, 7].item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token_id", [7, 8])
def test_a_masked_row_that_is_not_finite_says_so_and_spares_the_others(
    dtype: torch.dtype, bad: float, token_id: int
) -> None:
    """Also if the mask forbids the token: the same model gives the same error with a schema and without one."""
    sampler = Sampler(3, VOCABULARY, CPU, NO_TOKENS)
    for row in range(3):
        sampler.set_row(row, make_state(temperature=0).sampling)
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, token_id] = bad
    logits[2, token_id] = -math.inf
    samples = Samples.of(np.arange(3), np.full(3, 4), CPU)
    masks = [mask_of(row, 7, 9) for row in range(3)]
    expected = [max((7, 9), key=lambda token: logits[row, token].item()) for row in (0, 2)]
    assert sampler.sample(logits, samples, masks).token_ids.tolist() == [expected[0], -1, expected[1]]
