"""Tests experts with weights of 8 and 4 bits, for each instruction set that this CPU has."""

import pytest
import torch
from tests.engine.execution.native.checks import DTYPES, RUNS, random
from tests.engine.execution.native.test_integers import BITS, make_weight, multiply
from torch.nn import functional

from conveyor_engine.execution import native
from conveyor_engine.execution.native.experts import PackedExperts, PackedStack

pytestmark = RUNS
HIDDEN, SIZE, EXPERTS = 128, 96, 5


def make_experts(bits: int, dtype: torch.dtype) -> PackedExperts:
    """Return experts of which all weights are whole numbers, a twentieth as large as those of the products' tests."""
    experts = PackedExperts(
        torch.zeros(EXPERTS, 2 * SIZE, HIDDEN, dtype=dtype), torch.zeros(EXPERTS, HIDDEN, SIZE, dtype=dtype)
    )
    experts.gate_up, experts.down = (
        make_stack(*shape, bits, group) for shape, group in (((2 * SIZE, HIDDEN), 64), ((HIDDEN, SIZE), 32))
    )
    return experts


def make_stack(n: int, k: int, bits: int, group: int) -> PackedStack:
    stack = PackedStack.allocate(make_weight(n, k, bits, group), EXPERTS)
    for expert in range(EXPERTS):
        numbers = torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(expert)).to(torch.uint8)
        scales = ((random(n, k // group, dtype=torch.float32, seed=expert).abs() + 1) / (4 << bits)).to(torch.bfloat16)
        place = stack[expert]
        assert isinstance(place, native.PackedIntegers)
        place.fill(0, numbers, scales, None)
    return stack


def choose(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, the three experts of each token, and their shares. Number 5 is that of no expert."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, EXPERTS + 1, generator=generator).argsort(dim=1)[:, :3]
    return random(tokens, HIDDEN, dtype=dtype, seed=tokens), chosen, torch.rand(tokens, 3, generator=generator)


def compute(experts: PackedExperts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Compute the definition in float64, with rows rounded to 8 bits before both products."""
    total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for expert in range(EXPERTS):
        gate_up, down = experts.gate_up[expert], experts.down[expert]
        assert isinstance(gate_up, native.PackedIntegers)
        assert isinstance(down, native.PackedIntegers)
        gate, up = multiply(x, gate_up).to(x.dtype).float().chunk(2, dim=1)
        share = (shares * (chosen == expert)).sum(dim=1, keepdim=True)
        total += share * multiply((functional.silu(gate) * up).to(x.dtype), down)
    return total


@BITS
@DTYPES
@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_rounded_experts_equal_their_definition(bits: int, dtype: torch.dtype, tokens: int) -> None:
    """A number of a row that rounds to its neighbour changes its token a little."""
    experts, given = make_experts(bits, dtype), choose(tokens, dtype)
    expected = compute(experts, *given)
    errors = (experts.run(*given).double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.quantile(0.5) < (2e-6 if dtype == torch.float32 else 6e-3)
    assert errors.max() < 0.02


@BITS
@DTYPES
def test_a_token_has_the_same_bits_alone_and_among_others(bits: int, dtype: torch.dtype) -> None:
    experts, given = make_experts(bits, dtype), choose(70, dtype)
    whole = experts.run(*given)
    for token in range(0, 70, 3):
        assert torch.equal(experts.run(*(each[token : token + 1] for each in given))[0], whole[token])


@pytest.mark.parametrize("rounded", ["gate_up", "down"])
def test_one_of_the_matrices_may_keep_16_bits(rounded: str) -> None:
    """As if the other had a size that no group divides."""
    integers, given = make_experts(8, torch.bfloat16), choose(9, torch.bfloat16)
    plain = {
        name: torch.stack([native.unpack_integers(stack[expert]) for expert in range(EXPERTS)]).bfloat16()
        for name, stack in (("gate_up", integers.gate_up), ("down", integers.down))
    }
    mixed = PackedExperts(**plain)
    whole = mixed.run(*given)
    setattr(mixed, rounded, getattr(integers, rounded))
    found = mixed.run(*given)
    assert not torch.equal(found, whole)
    assert (found - whole).float().norm() / whole.float().norm() < 0.03
