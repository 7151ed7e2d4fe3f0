"""The kernels that sample: the right token of each row, and through the sampler the same tokens as torch's way."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.builders import make_state
from tests.engine.execution.interpreter import DEVICE, DTYPES, ON_DEVICE

from conveyor_engine.execution import kernels
from conveyor_engine.execution.kernels.sample import Draws, sample
from conveyor_engine.execution.sampling.draw import BELOW_ONE
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Sampler
from conveyor_engine.execution.sampling.temperature import GREEDY_BELOW

pytestmark = ON_DEVICE
SIZES = [5, 4096, 4097, 9000]  # of the vocabulary: less than a slice, one, a token more, several


def draws(temperatures: list[float], uniforms: list[float]) -> Draws:
    columns = (torch.tensor(values, dtype=torch.float32, device=DEVICE)[:, None] for values in (temperatures, uniforms))
    return Draws(*columns, GREEDY_BELOW, BELOW_ONE)


def drawn(logits: torch.Tensor, temperatures: list[float], uniforms: list[float]) -> list[int]:
    tokens: list[int] = sample(logits, draws(temperatures, uniforms))[1].tolist()
    return tokens


def make_logits(rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocab_size)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype).to(DEVICE)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_best_token_is_found_wherever_it_is_and_the_first_of_equals(vocab_size: int, place: float) -> None:
    token = round(place * (vocab_size - 1))
    logits = make_logits(2, vocab_size).clamp_max(8)
    logits[1, token:] = logits[0, token] = 9.0
    best, tokens = sample(logits, draws([0.0, 0.0], [0.3, 0.9]))
    assert (best.tolist(), tokens.tolist()) == ([9.0, 9.0], [token, token])
    assert drawn(logits, [0.0, GREEDY_BELOW / 2], [0.3, 0.9]) == [token, token]


@DTYPES
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_each_token_is_drawn_in_the_middle_of_its_share(
    vocab_size: int, temperature: float, dtype: torch.dtype
) -> None:
    logits = make_logits(8, vocab_size, dtype)
    weights = ((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature).exp()
    ends = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
    begins = ends - weights / weights.sum(-1, keepdim=True)
    wanted = weights.topk(2, dim=-1).indices[torch.arange(8), torch.arange(8) % 2][:, None].to(DEVICE)
    middles = ((begins + ends) / 2).gather(1, wanted).squeeze(1)
    assert drawn(logits, [temperature] * 8, middles.tolist()) == wanted.squeeze(1).tolist()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.full((3, 9000), -math.inf, device=DEVICE)
    logits[0, [1, 8998]] = 0.0
    logits[1, 5000] = -1000.0
    logits[2, [4095, 4096]] = 3e38
    tokens = drawn(logits, [1.0] * 3, [uniform] * 3)
    assert tokens[0] in (1, 8998)
    assert tokens[1] == 5000
    assert tokens[2] in (4095, 4096)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 8999])
def test_a_row_that_is_not_finite_says_so_and_spares_the_others(bad: float, token: int) -> None:
    logits = make_logits(3, 9000)
    logits[1, token] = bad
    logits[2] = -math.inf
    best, tokens = sample(logits, draws([1.0] * 3, [0.5] * 3))
    assert torch.isfinite(best).tolist() == [True, False, False]
    assert tokens[0] == drawn(logits[:1], [1.0], [0.5])[0]
    assert ((tokens >= 0) & (tokens < 9000)).all()


def test_rows_of_a_wider_matrix_are_read_where_they_lie() -> None:
    wide = make_logits(4, 9000)
    assert drawn(wide[::2, :4500], [0.0, 0.0], [0.5, 0.5]) == wide[::2, :4500].argmax(-1).tolist()


@pytest.mark.parametrize("position", [4, 5, 6])
def test_the_sampler_draws_as_it_does_without_the_kernels(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {},
        {"top_k": 3},
        {"top_p": 0.4, "temperature": 1.3},
        {"min_tokens": 2, "stop_token_ids": (7,)},
        {"temperature": 0.0, "min_tokens": 2, "logprobs": 2},
        {"temperature": 1e-7},
    ]
    rows = [make_state(seed=number, **params).sampling for number, params in enumerate(asked * 3)]
    entries = Samples.of(np.arange(len(rows)), np.full(len(rows), position), DEVICE)
    logits = make_logits(len(rows), 5000)

    def tokens() -> list[int]:
        sampler = Sampler(len(rows), 5000, DEVICE)
        for number, row in enumerate(rows):
            sampler.admit(number, row)
        chosen: list[int] = sampler.sample(logits, entries).token_ids.tolist()
        return chosen

    monkeypatch.setattr(kernels, "why_missing", lambda device: "not now")
    expected = tokens()
    monkeypatch.setattr(kernels, "why_missing", lambda device: None)
    assert tokens() == expected
