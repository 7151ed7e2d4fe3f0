"""Checks that the kernel for top_k and top_p keeps the tokens of a definition in float64, and draws each by its weight.

Equal logits are kept or cut together.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.engine.builders import make_state
from tests.engine.execution.interpreter import (
    DEVICE,
    DTYPES,
    FOR_BFLOAT16,
    HAVE_GPU,
    ON_DEVICE,
    TOLERANCE,
    sum_in_disorder,
)
from triton.runtime.interpreter import ScanOps

from conveyor_engine.execution.kernels.cut import cut
from conveyor_engine.execution.kernels.sample import sample
from conveyor_engine.execution.sampling import sampler
from conveyor_engine.execution.sampling.draw import BELOW_ONE
from conveyor_engine.execution.sampling.logit_processors import GREEDY_BELOW, find_floor
from conveyor_engine.execution.sampling.processor import Samples

pytestmark = ON_DEVICE
UNTOUCHED = -7
JUST_BELOW_ONE = 1 - 2**-24


@dataclass(frozen=True)
class Row:
    """The parameters of one row."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0

    def weigh(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the weights (vocabulary,) in float64, 0 where cut. This is the definition."""
        logits = logits.double()
        weights = ((logits - logits.max()) / self.temperature).exp()
        weights[weights < self.min_p] = 0
        descending = logits.sort(descending=True).values
        if self.top_k:
            weights[logits < descending[min(self.top_k, len(logits)) - 1]] = 0
        above = torch.stack([weights[logits > value].sum() for value in descending.unique()])
        weights[logits < descending.unique()[above < self.top_p * weights.sum()].min()] = 0
        return weights

    def made_clear(self, logits: torch.Tensor) -> "Row":
        """Return the row with a top_p that keeps the same tokens, but is not sensitive to rounding."""
        if self.top_p == 1:
            return self
        kept, of_all = self.weigh(logits), replace(self, top_p=1.0).weigh(logits)
        least = kept[logits == logits[kept > 0].min()].sum()
        return replace(self, top_p=float((kept.sum() - least / 2) / of_all.sum()))


ROWS = [
    *(Row(top_k=1), Row(top_k=40), Row(top_k=6000), Row(top_p=1e-6), Row(top_p=0.5), Row(top_p=0.95)),
    *(Row(top_p=0.99), Row(50, 0.9), Row(5000, 0.8), Row(50, 0.9, 0.1, 0.7), Row(0, 0.9, 0.05, 1.5)),
    *(Row(3000, 1.0, 0.3, 2.0), Row(top_p=0.9, temperature=1e-5), Row(top_p=0.9, temperature=30.0)),
]
LOGITS = {"peaked": 3.0, "flat": 0.3, "below zero": -1.0}  # the spread of the logits
# CI runs each spread, and both types of the interpreter. The other pairs only repeat these in one more way.
MARKS = {
    ("peaked", torch.float32): [],
    ("flat", torch.float32): [pytest.mark.slow],
    ("below zero", torch.float16): [pytest.mark.slow],
    **{(name, torch.bfloat16): FOR_BFLOAT16 for name in LOGITS},
}
CASES = pytest.mark.parametrize(
    ("spread", "dtype"),
    [
        pytest.param(
            spread, dtype, marks=MARKS.get((name, dtype), [pytest.mark.nightly]), id=f"{name}-{str(dtype)[6:]}"
        )
        for name, spread in LOGITS.items()
        for dtype in TOLERANCE
    ],
)


def make_logits(spread: float, dtype: torch.dtype, vocab_size: int = 9000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(vocab_size, generator=generator)
    return (logits.mul(spread) if spread > 0 else -logits.abs()).to(dtype)


def draw(logits: torch.Tensor, rows: list[Row], uniforms: list[float]) -> list[int]:
    """Draw a token for each row of logits (rows, vocabulary)."""
    off = logits.shape[1]
    draws = [[row.temperature, find_floor(row.min_p), row.top_k or off, row.top_p] for row in rows]
    tokens = torch.full((len(rows),), UNTOUCHED, device=DEVICE)
    numbers = torch.tensor(uniforms, device=DEVICE)[:, None]
    best = logits.float().nan_to_num(math.inf, math.inf, -math.inf).amax(-1).to(DEVICE)
    cut(logits.to(DEVICE), torch.tensor(draws, device=DEVICE), numbers, best, tokens, GREEDY_BELOW, BELOW_ONE)
    return list(tokens.tolist())


@pytest.mark.slow
@CASES
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_kept_tokens_are_those_of_the_definition(dtype: torch.dtype, spread: float, row: Row) -> None:
    """In ascending order, the first token that can be drawn is the smallest one that is kept."""
    logits = make_logits(spread, dtype).sort().values
    row = row.made_clear(logits)
    assert draw(logits[None], [row], [0.0]) == [int((row.weigh(logits) > 0).nonzero()[0])]


@pytest.mark.slow
@DTYPES
@pytest.mark.parametrize("row", [Row(top_k=10), Row(top_k=5000), Row(top_p=0.5), Row(top_p=0.95)], ids=str)
def test_equal_logits_are_kept_or_cut_together(dtype: torch.dtype, row: Row) -> None:
    logits = make_logits(1.0, dtype).mul(2).round().sort().values
    assert len(logits.unique()) < 20
    row = row.made_clear(logits)
    assert draw(logits[None], [row], [0.0]) == [int((row.weigh(logits) > 0).nonzero()[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "row"),
    [
        *(("peaked", Row(top_k=40)), ("peaked", Row(top_p=0.99, min_p=0.01)), ("flat", Row(top_p=0.7))),
        *(("flat", Row(6000, 0.95)), ("below zero", Row(6000, 0.8))),
    ],
    ids=str,
)
def test_each_kept_token_is_drawn_in_the_middle_of_its_share(kind: str, row: Row) -> None:
    logits = make_logits(LOGITS[kind], torch.float32)
    row = row.made_clear(logits)
    weights = row.weigh(logits)
    shares = weights / weights.sum()
    expected = weights.topk(3).indices
    middles = (shares.cumsum(0) - shares / 2)[expected]
    assert draw(logits.expand(3, -1), [row] * 3, middles.tolist()) == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("row", "kept"), [(Row(top_k=3), 3), (Row(top_p=0.65), 2), (Row(4, 0.9), 4)], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(row: Row, kept: int) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
    times = 20
    tokens = draw(probabilities.log().expand(times, -1), [row] * times, [(n + 0.5) / times for n in range(times)])
    counts = np.bincount(tokens, minlength=5)
    cut_off = probabilities < probabilities.topk(kept).values.min()
    shares = probabilities.masked_fill(cut_off, 0) / probabilities[~cut_off].sum()
    assert np.abs(counts - times * shares.numpy()).max() <= 1


@pytest.mark.slow
@pytest.mark.skipif(HAVE_GPU, reason="a GPU sums in its own way")
@pytest.mark.parametrize("row", [Row(top_k=30), Row(top_k=5000), Row(top_p=0.9)], ids=str)
def test_no_other_token_is_drawn_even_if_the_cumulated_weights_fall(monkeypatch: pytest.MonkeyPatch, row: Row) -> None:
    count = ScanOps.cumsum

    def cumsum(self: ScanOps, x: object) -> object:
        weights = x.handle.data  # type: ignore[attr-defined]
        if weights.dtype != np.float32:
            return count(self, x)
        return [self.to_tensor(sum_in_disorder(weights, self.axis), x.dtype)]  # type: ignore[attr-defined]

    monkeypatch.setattr(ScanOps, "cumsum", cumsum)
    logits = make_logits(1.0, torch.float32)
    logits[torch.rand(len(logits), generator=torch.Generator().manual_seed(1)) < 0.3] = -math.inf
    row = row.made_clear(logits)
    tokens = draw(logits.expand(4, -1), [row] * 4, [*(number / 3 for number in range(3)), JUST_BELOW_ONE])
    assert (row.weigh(logits)[tokens] > 0).all()
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("row", [Row(top_k=5), Row(top_p=0.9), Row(5, 0.9, 0.1)], ids=str)
def test_a_row_that_is_not_finite_is_left_as_it_is(row: Row) -> None:
    logits = make_logits(1.0, torch.float32, 300).repeat(3, 1)
    logits[0, 7], logits[1, 299], logits[2] = math.nan, math.inf, -math.inf
    assert draw(logits, [row] * 3, [0.5] * 3) == [UNTOUCHED] * 3


def test_a_row_without_cuts_is_left_as_it_is() -> None:
    logits = make_logits(1.0, torch.float32, 300).repeat(2, 1)
    tokens = draw(logits, [Row(top_k=1), Row(top_k=1, temperature=0.0)], [0.5] * 2)
    assert tokens == [int(logits[0].argmax()), UNTOUCHED]


@pytest.mark.parametrize("uniform", [0.0, 0.5, JUST_BELOW_ONE])
@pytest.mark.parametrize(
    "row", [Row(top_k=5), Row(top_p=0.9), Row(top_k=8000), Row(20, 0.9, 0.1), Row(3, 0.9, temperature=1e-5)], ids=str
)
def test_of_few_finite_logits_only_these_are_drawn(row: Row, uniform: float) -> None:
    logits = torch.full((3, 9000), -math.inf)
    logits[0, 8999] = -1000.0
    logits[1, [4095, 4096]] = 3e38
    logits[2, [0, 8000]] = torch.tensor([5.0, 5.0 - 300])
    tokens = draw(logits, [row] * 3, [uniform] * 3)
    assert tokens[0] == 8999
    assert tokens[1] in (4095, 4096)
    assert tokens[2] == 0


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, -5.0])
@pytest.mark.parametrize("row", [Row(top_k=5), Row(top_p=0.3)], ids=str)
def test_of_equal_logits_all_can_be_drawn(row: Row, value: float) -> None:
    logits = torch.full((3, 5000), value)
    assert draw(logits, [row] * 3, [0.0, 0.5, JUST_BELOW_ONE]) == [0, 2499, 4999]


@pytest.mark.slow
def test_a_rows_token_is_its_own_whatever_else_is_in_the_batch() -> None:
    wide = torch.stack([make_logits(spread, torch.float32, 9040) for spread in (1.0, 2.0, 0.5, 3.0)])
    rows = [Row(top_k=40), Row(top_p=0.9), Row(top_p=0.99), Row(50, 0.9, 0.1)]
    alone = [draw(wide[[number], :9000], [row], [0.3])[0] for number, row in enumerate(rows)]
    assert draw(wide[:, :9000], rows, [0.3] * 4) == alone


def test_the_sampler_draws_rows_with_cuts_by_this_kernel_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a mixed batch, rows that keep one token, or have no cuts, get the same tokens as without the kernels."""
    cases = [
        *({"temperature": 0.0}, {}, {"temperature": 0.7, "min_p": 0.2}, {"top_k": 1}, {"top_p": 1e-6}),
        *({"top_k": 1, "min_tokens": 2, "stop_token_ids": (7,)}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.9}),
        *({"top_k": 20, "top_p": 0.8, "temperature": 1.3, "min_p": 0.05}, {"top_k": 300}, {"top_k": 5}),
    ]
    logits = torch.stack([make_logits(2.0, torch.float32, 1000 + row)[:1000] for row in range(len(cases))])
    logits[8, 3], logits[11] = math.nan, -math.inf
    logits = logits.to(DEVICE)
    entries = Samples.of(np.arange(len(cases)), np.full(len(cases), 4), DEVICE)

    def tokens(by_kernels: bool) -> list[int]:
        monkeypatch.setattr(sampler, "_find_kernel", lambda _: sample if by_kernels else None)
        monkeypatch.setattr(sampler, "_find_cut", lambda _: cut)
        chosen = sampler.Sampler(len(cases), 1000, DEVICE, torch.zeros((0, 0), dtype=torch.int32, device=DEVICE))
        for number, params in enumerate(cases):
            chosen.set_row(number, make_state(seed=number, **params).sampling)
        if by_kernels:
            monkeypatch.setattr(chosen, "_draw", lambda *_: pytest.fail("torch's operations draw"))
        return list(chosen.sample(logits, entries).token_ids.tolist())

    drawn, expected = tokens(by_kernels=True), tokens(by_kernels=False)
    same = [0, 1, 2, 3, 4, 5, 8, 11]
    assert [drawn[row] for row in same] == [expected[row] for row in same]
    for row, how in {6: Row(5), 7: Row(top_p=0.9), 9: Row(20, 0.8, 0.05, 1.3), 10: Row(300)}.items():
        kept = how.weigh(logits[row].cpu()) > 0
        assert kept[drawn[row]], row
        assert kept[expected[row]], row
