"""Tests the kernels that sample: the right token for each row, and in the sampler the same tokens as with torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.builders import make_state
from tests.engine.execution.interpreter import DEVICE, HAVE_GPU, ON_DEVICE, sum_in_disorder
from triton.runtime.interpreter import ScanOps

from conveyor_engine.execution import native
from conveyor_engine.execution.kernels.sample import sample as sample_by_triton
from conveyor_engine.execution.sampling import sampler
from conveyor_engine.execution.sampling.draw import BELOW_ONE
from conveyor_engine.execution.sampling.logit_processors import GREEDY_BELOW
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import AtOnce

pytestmark = ON_DEVICE
NO_TOKENS = torch.zeros((0, 0), dtype=torch.int32)  # of rows without penalties
# Of the vocabulary: less than a slice of Triton's, one slice, one token more, several.
SIZES = [5, pytest.param(4096, marks=pytest.mark.slow), 4097, 9000]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that samples, in float32 on the CPU, and the types of logits that can be tested here."""

    of: AtOnce
    device: torch.device
    dtypes: tuple[torch.dtype, ...]

    def sample(
        self, logits: torch.Tensor, temperatures: list[float], uniforms: list[float], floor: float = -math.inf
    ) -> tuple[Any, Any]:
        draws = torch.tensor([[temperature, floor] for temperature in temperatures], device=self.device)
        column = torch.tensor(uniforms, device=self.device)[:, None]
        best, tokens = self.of(logits.to(self.device), draws, column, GREEDY_BELOW, BELOW_ONE)
        return best.tolist(), tokens.tolist()

    def draw(
        self, logits: torch.Tensor, temperatures: list[float], uniforms: list[float], floor: float = -math.inf
    ) -> list[int]:
        return list(self.sample(logits, temperatures, uniforms, floor)[1])


TRITON = Kernel(sample_by_triton, DEVICE, (torch.float32, torch.float16, *([torch.bfloat16] if HAVE_GPU else [])))
NATIVE = Kernel(native.sample, torch.device("cpu"), (torch.float32, torch.bfloat16, torch.float16))


@pytest.fixture(params=["triton", "generic", "avx2", "avx512", "avx512bf16", "amx"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if request.param == "triton":
        yield TRITON
        return
    if reason := native.why_missing():
        pytest.skip(f"needs the compiled kernels: {reason}")
    before = native.isa()
    if not native.use_isa(request.param):
        pytest.skip(f"this CPU or this build has no {request.param}")
    yield NATIVE
    native.use_isa(before)


def make_logits(rows: int, vocab_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * vocab_size)
    return (torch.randn(rows, vocab_size, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("place", [0.0, pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_the_best_token_is_found_wherever_it_is_and_the_first_of_equals(
    kernel: Kernel, vocab_size: int, place: float
) -> None:
    token = round(place * (vocab_size - 1))
    logits = make_logits(2, vocab_size).clamp_max(8)
    logits[1, token:] = logits[0, token] = 9.0
    assert kernel.sample(logits, [0.0, 0.0], [0.3, 0.9]) == ([9.0, 9.0], [token, token])
    assert kernel.draw(logits, [0.0, GREEDY_BELOW / 2], [0.3, 0.9]) == [token, token]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("temperature", [0.5, pytest.param(1.0, marks=pytest.mark.slow), 1.7])
def test_each_token_is_drawn_in_the_middle_of_its_share(kernel: Kernel, vocab_size: int, temperature: float) -> None:
    for dtype in kernel.dtypes:
        logits = make_logits(8, vocab_size, dtype)
        weights = ((logits.double() - logits.double().amax(-1, keepdim=True)) / temperature).exp()
        ends = weights.cumsum(-1) / weights.sum(-1, keepdim=True)
        begins = ends - weights / weights.sum(-1, keepdim=True)
        expected = weights.topk(2, dim=-1).indices[torch.arange(8), torch.arange(8) % 2][:, None]
        middles = ((begins + ends) / 2).gather(1, expected).squeeze(1)
        assert kernel.draw(logits, [temperature] * 8, middles.tolist()) == expected.squeeze(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("min_p", [1e-4, 0.2, 1.0])
def test_of_tokens_above_a_floor_each_is_drawn_in_the_middle_of_its_share(
    kernel: Kernel, vocab_size: int, min_p: float
) -> None:
    logits = make_logits(8, vocab_size)
    weights = ((logits.double() - logits.double().amax(-1, keepdim=True)) / 0.7).exp()
    weights[weights < min_p] = 0
    shares = weights / weights.sum(-1, keepdim=True)
    ends = shares.cumsum(-1)
    expected = torch.multinomial(weights, 1, generator=torch.Generator().manual_seed(0))
    middles = (ends - shares / 2).gather(1, expected).squeeze(1)
    assert kernel.draw(logits, [0.7] * 8, middles.tolist(), math.log(min_p)) == expected.squeeze(1).tolist()
    for uniform in (0.0, 1 - 2**-24):
        drawn = torch.tensor(kernel.draw(logits, [0.7] * 8, [uniform] * 8, math.log(min_p)))
        assert (weights[torch.arange(8), drawn] > 0).all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_of_probability_zero_is_never_drawn(kernel: Kernel, uniform: float) -> None:
    logits = torch.full((3, 9000), -math.inf)
    logits[0, [1, 8998]] = 0.0
    logits[1, 5000] = -1000.0
    logits[2, [4095, 4096]] = 3e38
    tokens = kernel.draw(logits, [1.0] * 3, [uniform] * 3)
    assert tokens[0] in (1, 8998)
    assert tokens[1] == 5000
    assert tokens[2] in (4095, 4096)


@pytest.mark.slow
@pytest.mark.skipif(HAVE_GPU, reason="a GPU sums in its own way")
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("draw_from", [None, {}, {"top_k": 3}, {"top_k": 300}, {"top_p": 0.9}], ids=str)
def test_a_token_of_probability_zero_is_never_drawn_even_if_the_cumulated_weights_fall(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, draw_from: dict[str, Any] | None
) -> None:
    """Tests Triton's kernel (None), and torch with these parameters."""
    rows = 64
    logits = make_logits(rows, vocab_size)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.7] = -math.inf
    logits[:, 4] = 0.0
    monkeypatch.setattr(
        ScanOps, "cumsum", lambda self, x: [self.to_tensor(sum_in_disorder(x.handle.data, self.axis), x.dtype)]
    )
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, axis: torch.from_numpy(sum_in_disorder(x.numpy(), axis)))
    if draw_from is None:
        tokens = TRITON.draw(logits, [1.0] * rows, [number / rows for number in range(rows)])
    else:
        monkeypatch.setattr(sampler, "_find_kernel", lambda _: None)
        chosen = sampler.Sampler(rows, vocab_size, TRITON.device, NO_TOKENS)
        for row in range(rows):
            chosen.set_row(row, make_state(seed=row, **draw_from).sampling)
        entries = Samples.of(np.arange(rows), np.arange(rows), TRITON.device)
        tokens = chosen.sample(logits, entries).token_ids.tolist()
    assert [row for row, token in enumerate(tokens) if logits[row, token] == -math.inf] == []
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("token", [0, 8999])
def test_a_row_that_is_not_finite_says_so_and_spares_the_others(kernel: Kernel, bad: float, token: int) -> None:
    logits = make_logits(3, 9000)
    logits[1, token] = bad
    logits[2] = -math.inf
    best, tokens = kernel.sample(logits, [1.0] * 3, [0.5] * 3)
    assert [math.isfinite(value) for value in best] == [True, False, False]
    assert tokens[0] == kernel.draw(logits[:1], [1.0], [0.5])[0]
    assert all(0 <= token < 9000 for token in tokens)


def test_rows_of_a_wider_matrix_are_read_where_they_lie(kernel: Kernel) -> None:
    wide = make_logits(4, 9000)
    assert kernel.draw(wide[::2, :4500], [0.0, 0.0], [0.5, 0.5]) == wide[::2, :4500].argmax(-1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("position", [4, 5, 6])
def test_the_sampler_draws_as_it_does_without_the_kernels(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {},
        {"top_k": 3},
        {"top_p": 0.4, "temperature": 1.3},
        {"min_tokens": 2, "stop_token_ids": (7,)},
        {"temperature": 0.0, "min_tokens": 2, "logprobs": 2},
        {"temperature": 1e-7},
        {"min_p": 0.2},
        {"min_p": 0.3, "top_p": 0.9},
        {"min_p": 0.01, "top_k": 300, "temperature": 2.0},
    ]
    rows = [make_state(seed=number, **params).sampling for number, params in enumerate(choices * 3)]
    entries = Samples.of(np.arange(len(rows)), np.full(len(rows), position), kernel.device)
    logits = make_logits(len(rows), 5000).to(kernel.device)

    def tokens(way: AtOnce | None) -> list[int]:
        monkeypatch.setattr(sampler, "_find_kernel", lambda device: way)
        monkeypatch.setattr(sampler, "_find_cut", lambda device: None)
        chosen = sampler.Sampler(len(rows), 5000, kernel.device, NO_TOKENS.to(kernel.device))
        for number, row in enumerate(rows):
            chosen.set_row(number, row)
        return list(chosen.sample(logits, entries).token_ids.tolist())

    assert tokens(kernel.of) == tokens(None)


def test_an_engine_on_a_cpu_samples_with_the_compiled_kernel() -> None:
    expected = native.sample if native.why_missing() is None else None
    assert sampler._find_kernel(torch.device("cpu")) is expected
