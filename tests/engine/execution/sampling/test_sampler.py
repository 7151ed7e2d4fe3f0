"""Tests what the sampler chooses: the right token, the right frequencies, and the same tokens for the same seed."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.builders import EOS, make_state
from torch.utils._python_dispatch import TorchDispatchMode

from conveyor_engine.execution.sampling import cuts
from conveyor_engine.execution.sampling import sampler as sampler_module
from conveyor_engine.execution.sampling.draw import uniform_numbers
from conveyor_engine.execution.sampling.processor import Samples
from conveyor_engine.execution.sampling.sampler import Sampled, Sampler
from conveyor_engine.wire.step import RowSampling

PROBABILITIES = (0.4, 0.3, 0.15, 0.1, 0.05)


def row(**params: Any) -> RowSampling:
    """Return the sampling of a request with a prompt of four tokens."""
    return make_state(**params).sampling


def admit(rows: list[RowSampling], vocab_size: int) -> Sampler:
    """Return a sampler that has exactly these rows."""
    sampler = Sampler(max(1, len(rows)), vocab_size, torch.device("cpu"), torch.zeros((len(rows), 64)).int())
    for number, sampling in enumerate(rows):
        sampler.set_row(number, sampling)
    return sampler


def samples(num_rows: int, position: int = 4) -> Samples:
    """Return one entry for each row, all at one position."""
    return Samples.of(np.arange(num_rows), np.full(num_rows, position), torch.device("cpu"))


def draw(logits: torch.Tensor, rows: list[RowSampling]) -> Sampled:
    return admit(rows, logits.shape[1]).sample(logits, samples(len(rows)))


def sample(
    logits: torch.Tensor, rows: list[RowSampling], position: int = 4, shared: Sampler | None = None
) -> list[int]:
    """Return the tokens. `position` applies to all rows; `shared` is a sampler that has the rows already."""
    sampler = shared or admit(rows, logits.shape[1])
    tokens: list[int] = sampler.sample(logits, samples(len(rows), position)).token_ids.tolist()
    return tokens


def logits_of(*probabilities: float, rows: int = 1) -> torch.Tensor:
    """Return logits whose softmax is `probabilities`, the same in all rows."""
    return torch.tensor([math.log(p) if p else -math.inf for p in probabilities]).repeat(rows, 1)


def frequencies(**params: Any) -> list[float]:
    """Return how often each of the five tokens is drawn from PROBABILITIES, over rows with different seeds."""
    rows = 20_000
    states = [row(seed=seed, **params) for seed in range(rows)]
    tokens = sample(logits_of(*PROBABILITIES, rows=rows), states)
    return [count / rows for count in np.bincount(tokens, minlength=len(PROBABILITIES))]


def expected(*weights: float) -> Any:
    total = sum(weights)
    return pytest.approx([weight / total for weight in weights], abs=0.015)


def test_temperature_zero_takes_the_best_token() -> None:
    assert sample(logits_of(0.2, 0.5, 0.3), [row(temperature=0)]) == [1]


@pytest.mark.parametrize("params", [{"temperature": 1e-50}, {"temperature": 1e-5}, {"top_p": 1e-50}, {"top_p": 1e-9}])
@pytest.mark.parametrize("top_k", [0, 3])
def test_parameters_too_small_for_float32_take_the_best_token(params: dict[str, Any], top_k: int) -> None:
    states = [row(seed=seed, top_k=top_k, **params) for seed in range(50)]
    assert sample(logits_of(0.2, 0.3, 0.5, 0.0, rows=50), states) == [2] * 50


@pytest.mark.parametrize(
    ("params", "tokens"),
    [
        ({"temperature": 0.0}, [640, 248, 848, 706, 698, 990, 397, 160]),
        ({}, [320, 973, 443, 385, 563, 835, 936, 992]),
        ({"temperature": 0.5}, [334, 965, 450, 367, 536, 845, 936, 992]),
        ({"top_p": 0.8}, [334, 183, 649, 16, 325, 702, 294, 420]),
        ({"top_k": 5}, [888, 669, 868, 200, 703, 962, 698, 70]),
        ({"top_k": 400, "top_p": 0.95, "temperature": 1.5}, [316, 985, 448, 391, 565, 831, 936, 992]),
    ],
)
def test_a_seed_gives_these_very_tokens(params: dict[str, Any], tokens: list[int]) -> None:
    """Compares with tokens recorded when top_k, top_p and temperature were separated, so that upgrades repeat old
    answers."""
    angles = torch.arange(8 * 1000, dtype=torch.float64) ** 2 * 0.37
    logits = 6 * angles.sin().float().view(8, 1000)
    sampler = admit([row(seed=42, **params)] * 8, 1000)
    entries = Samples.of(np.arange(8), np.arange(8), torch.device("cpu"))
    assert sampler.sample(logits, entries).token_ids.tolist() == tokens


@pytest.mark.parametrize("vocab_size", [128, 1024, 1000])
def test_the_best_token_of_a_large_vocabulary_is_found_wherever_it_is(vocab_size: int) -> None:
    best = [0, 1, 127, vocab_size // 2, vocab_size - 2, vocab_size - 1]
    logits = torch.randn(len(best), vocab_size)
    logits[torch.arange(len(best)), torch.tensor(best)] = 9.0
    assert sample(logits, [row(temperature=0) for _ in best]) == best


@pytest.mark.slow
@pytest.mark.parametrize(
    "params", [{}, {"top_p": 0.999}, {"top_p": 0.5}, {"top_k": 300}, {"top_k": 300, "top_p": 0.9}, {"top_k": 32}]
)
@pytest.mark.parametrize("vocab_size", [640, 600])
def test_large_vocabularies_are_drawn_from_with_the_right_frequencies(vocab_size: int, params: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weights = torch.rand(vocab_size).double() ** 3
    probabilities = weights / weights.sum()
    order = probabilities.argsort(descending=True)[: params.get("top_k", vocab_size)]
    kept = probabilities[order] / probabilities[order].sum()
    allowed = order[kept.cumsum(0) - kept < params.get("top_p", 1.0)]
    rows = 10_000
    states = [row(seed=seed, **params) for seed in range(rows)]
    tokens = sample(probabilities.log().float().expand(rows, -1).contiguous(), states)
    counts = torch.from_numpy(np.bincount(tokens, minlength=vocab_size)).double()
    assert int(counts.sum()) == int(counts[allowed].sum()) == rows
    expected = rows * probabilities[allowed] / probabilities[allowed].sum()
    often = expected > 10
    chi_squared = float(((counts[allowed] - expected) ** 2 / expected)[often].sum())
    freedom = int(often.sum())
    assert abs(chi_squared - freedom) < 4 * math.sqrt(2 * freedom)


def test_temperature_one_draws_from_the_distribution() -> None:
    assert frequencies() == expected(*PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    assert frequencies(temperature=temperature) == expected(*(p ** (1 / temperature) for p in PROBABILITIES))


def test_top_k_keeps_the_k_best() -> None:
    assert frequencies(top_k=2) == expected(0.4, 0.3, 0, 0, 0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.39, 1), (0.41, 2), (0.71, 3), (0.86, 4), (0.99, 5)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, kept: int) -> None:
    assert frequencies(top_p=top_p) == expected(*PROBABILITIES[:kept], *[0] * (5 - kept))


def test_top_p_is_of_what_top_k_has_left() -> None:
    # with 0.4 and 0.3, the first alone has 0.57
    assert frequencies(top_k=2, top_p=0.5) == expected(0.4, 0, 0, 0, 0)


def test_each_row_has_its_own_parameters() -> None:
    rows = [
        row(temperature=0),
        row(top_k=1, seed=1),
        row(seed=2),
        row(top_p=0.3, seed=3),
    ]
    seen = [set[int]() for _ in rows]
    shared = admit(rows, len(PROBABILITIES))
    for step in range(300):
        for index, token_id in enumerate(sample(logits_of(*PROBABILITIES, rows=4), rows, 4 + step, shared)):
            seen[index].add(token_id)
    assert seen == [{0}, {0}, {0, 1, 2, 3, 4}, {0}]


def test_only_rows_that_choose_at_random_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighing is expensive: exp over the vocabulary, in float32. Tests without the kernels that sample at once."""
    monkeypatch.setattr(sampler_module, "_find_kernel", lambda device: None)
    weighed: list[int] = []
    exp = torch.Tensor.exp_
    monkeypatch.setattr(torch.Tensor, "exp_", lambda x: (weighed.append(len(x)), exp(x))[1])
    rows = [row(temperature=0) for _ in range(9)] + [row(top_p=0.3), row(top_k=2, top_p=0.1), row(), row()]
    assert sample(logits_of(*PROBABILITIES, rows=13), rows)[:11] == [0] * 11
    assert weighed == [2, 1, 1], "those that draw from all tokens, then those that draw from a few, then from some"


@pytest.mark.parametrize("vocab_size", [128 * 40, 5000, 31])
@pytest.mark.parametrize("spread", [0.01, 3])
def test_the_few_best_are_found_wherever_they_are(vocab_size: int, spread: float) -> None:
    """Also if all of them are in one block, and in bfloat16, where many logits are equal."""
    torch.manual_seed(0)
    logits = torch.randn(6, vocab_size).mul(spread).to(torch.bfloat16)
    logits[0, : cuts.FEW * 2] += 9
    values, token_ids = cuts.find_few(logits)
    assert torch.equal(values, logits.topk(min(cuts.FEW, vocab_size)).values)
    assert torch.equal(logits.gather(1, token_ids), values)
    assert all(len(set(row)) == len(row) for row in token_ids.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [1, 2, 256])
def test_cuts_beyond_the_first_candidates_look_at_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, candidates: int
) -> None:
    monkeypatch.setattr(cuts, "CANDIDATES", candidates)
    monkeypatch.setattr(cuts, "FEW", 1)
    assert frequencies(top_p=0.86) == expected(0.4, 0.3, 0.15, 0.1, 0)
    assert frequencies(top_k=4, top_p=0.72) == expected(0.4, 0.3, 0, 0, 0), "of all tokens the first two are 0.7"


def test_a_large_top_k_makes_nobody_else_look_at_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[tuple[int, ...]] = []
    topk, sort = torch.Tensor.topk, cuts._sort_descending
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k, **by: (looked_at.append((len(x), k)), topk(x, k, **by))[1])
    monkeypatch.setattr(cuts, "_sort_descending", lambda x: (looked_at.append(tuple(x.shape)), sort(x))[1])
    rows = [row(top_k=5000), row(top_k=5), row(top_p=0.1), row()]
    sample(torch.randn(4, 6000) * 3, rows)
    assert looked_at == [(1, 32), (2, 256), (1, 6000)]


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 5000}, {"top_k": 4, "temperature": 0.7}],
)
def test_a_seed_repeats_its_tokens_whatever_else_is_in_the_batch(params: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(40, 32_000) * 3 * 16).round() / 16  # many equal logits, as in bfloat16

    def drawn_beside(neighbours: int) -> list[int]:
        tokens: list[int] = []
        for step in range(40):
            others = [row(seed=1000 + step, top_k=300 * i, top_p=0.5) for i in range(neighbours)]
            batch = torch.cat([logits[step : step + 1], torch.randn(neighbours, 32_000)])
            tokens.append(sample(batch, [row(seed=7, **params), *others], 4 + step)[0])
        return tokens

    alone = drawn_beside(0)
    assert drawn_beside(3) == alone
    assert len(set(alone)) > 10


@pytest.mark.parametrize("vocab_size", [151_936, 50_257, 100])
def test_a_rows_sum_is_the_same_to_the_bit_whatever_else_is_in_the_batch(vocab_size: int) -> None:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(10):
            weights = torch.rand(2, vocab_size)
            assert torch.equal(cuts._sum(weights)[:1], cuts._sum(weights[:1]))
    finally:
        torch.set_num_threads(threads)
    assert cuts._sum(weights).squeeze(1).tolist() == pytest.approx(weights.double().sum(-1).tolist())


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(1, 100_000)
    drawn = {sample(logits, [row()])[0] for _ in range(5)}
    assert len(drawn) > 1


def test_one_seed_draws_evenly_over_positions_and_one_position_over_seeds() -> None:
    ten_thousand = np.arange(10_000, dtype=np.uint64)
    for seeds, positions in (
        (np.full_like(ten_thousand, 42), ten_thousand),
        (ten_thousand, np.full_like(ten_thousand, 9)),
    ):
        uniforms = uniform_numbers(seeds, positions)
        counts = np.histogram(uniforms, bins=20, range=(0, 1))[0]
        chi_squared = float(((counts - 500) ** 2 / 500).sum())
        assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]) < 0.04


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    states = [row(seed=seed) for seed in range(5_000)]
    tokens = sample(logits_of(0.5, 0.0, 0.5, 0.0, rows=5_000), states)
    assert set(tokens) == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_forbids_every_token_that_would_stop(temperature: float) -> None:
    row_params = row(temperature=temperature, min_tokens=2, stop_token_ids=(1,), seed=0)
    logits = torch.zeros(1, 4)
    logits[0, [1, EOS]] = 50.0
    for position in (4, 5):
        assert sample(logits, [row_params], position)[0] in (0, 3)
    assert sample(logits, [row_params], 6)[0] in (1, EOS)
    assert logits[0, 1] == 50.0, "the model's logits are left alone"


def test_each_row_is_held_to_its_own_min_tokens() -> None:
    rows = [row(temperature=0, min_tokens=count, stop_token_ids=(token,)) for count, token in ((1, 4), (2, 5))]
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 8.0, 7.0]]).repeat(2, 1)
    logits[1, 5] = 8.5
    shared = admit(rows, 6)
    seen = [sample(logits, rows, position, shared) for position in (4, 5, 6)]
    assert seen == [[5, 4], [EOS, 4], [EOS, EOS]]


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_all_rows_are_processed_at_once_and_not_row_by_row() -> None:
    counts = []
    for rows in (8, 64):
        row_params = [
            row(temperature=i % 2, min_tokens=9, logprobs=1, top_p=0.9, seed=i, frequency_penalty=1.0, min_p=0.1)
            for i in range(rows)
        ]
        shared, logits = admit(row_params, 8), torch.zeros(rows, 8)
        with Operations() as operations:
            shared.sample(logits, samples(rows))
        counts.append(operations.counted)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("params", "waits"),
    [
        ({}, False),
        ({"temperature": 0.5}, False),
        ({"top_k": 20, "top_p": 0.8}, False),
        ({"min_p": 0.1, "presence_penalty": 1.0, "repetition_penalty": 1.2}, False),
        ({"logit_bias": ((1, 1.0),), "bad_words": ((1, 2),), "allowed_token_ids": (1, 2)}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 300}, True),
    ],
)
def test_only_cuts_without_a_small_top_k_wait_for_what_the_device_computes(params: dict[str, Any], waits: bool) -> None:
    """The host must know for which rows the first candidates are too few. It waits for the device only for this."""
    rows = [row(temperature=0, min_tokens=9, logprobs=1), row(min_tokens=9, seed=1, **params)]
    shared = admit(rows, 1000)
    with Operations() as operations:
        shared.sample(torch.randn(2, 1000), samples(2))
    waiting = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique"}
    assert bool(waiting & operations.counted.keys()) == waits


def test_log_probabilities_are_the_models_own_and_only_for_rows_that_request_them() -> None:
    def greedy(**params: Any) -> RowSampling:
        return row(temperature=0.1, top_k=1, **params)

    rows = [greedy(logprobs=2), greedy(), greedy(logprobs=0)]
    logprobs = draw(logits_of(0.1, 0.6, 0.3, rows=3), rows).logprobs
    assert logprobs is not None
    first, none, chosen_only = (entries and entries[0] for entries in logprobs.by_row(3))
    assert first is not None
    assert (first.token_id, first.top_token_ids) == (1, [1, 2])
    assert first.logprob == pytest.approx(math.log(0.6), abs=1e-5)
    assert first.top_logprobs == pytest.approx([math.log(0.6), math.log(0.3)], abs=1e-5)
    assert none is None
    assert chosen_only is not None
    assert chosen_only.top_token_ids == []


def test_without_requests_no_log_probabilities_are_computed() -> None:
    assert draw(logits_of(0.5, 0.5), [row()]).logprobs is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.5, "logprobs": 1}])
def test_logits_that_are_not_finite_give_no_token_and_spare_the_other_rows(bad: float, params: dict[str, Any]) -> None:
    logits = logits_of(0.9, 0.1, rows=2)
    logits[0, 1] = bad
    assert sample(logits, [row(**params), row(temperature=0)]) == [-1, 0]


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_too(dtype: torch.dtype) -> None:
    logits = logits_of(0.9, 0.05, 0.05, rows=200).to(dtype)
    tokens = sample(logits, [row(seed=seed, top_p=0.95) for seed in range(200)])
    assert 0.8 < tokens.count(0) / 200 < 1
