"""Compares experts with weights in 4 and 8 bits with plain ones, on a GPU or otherwise in Triton's interpreter."""

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, DTYPES, ON_DEVICE, assert_close, random
from tests.engine.execution.kernels.test_packed_product import CASES, COLUMNS, Form, make

from conveyor_engine.execution.kernels.packed_experts import MANY, multiply_experts, plan_tiles
from conveyor_engine.execution.kernels.weights import Kind

pytestmark = ON_DEVICE

EXPERTS, SIZE = 5, 70  # outputs of each: no multiple of a tile
MANY_TOKENS = MANY * EXPERTS // 2 + 1  # each has two experts


def choose(tokens: int, per_token: int, num_experts: int = EXPERTS) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.rand(tokens, num_experts).argsort(dim=1)[:, :per_token].to(DEVICE)


@DTYPES
@CASES
@pytest.mark.parametrize("tokens", [1, pytest.param(7, marks=pytest.mark.nightly), MANY_TOKENS])
def test_each_token_is_multiplied_with_its_experts(
    dtype: torch.dtype, kind: Kind, group: int, form: Form, tokens: int
) -> None:
    packed, weight = make(kind, group, form, EXPERTS * SIZE)
    x, chosen = random(tokens, COLUMNS, dtype=dtype), choose(tokens, 2)
    plan = plan_tiles(chosen, EXPERTS)
    assert plan.has_many == (tokens == MANY_TOKENS)
    exact = torch.einsum("ti,tkoi->tko", x.double(), weight.double().view(EXPERTS, SIZE, -1)[chosen])
    assert_close(multiply_experts(x, packed, plan), exact.flatten(0, 1))
    of_pairs, shares = random(2 * tokens, COLUMNS, dtype=dtype), torch.rand(tokens, 2, device=DEVICE)
    exact = torch.einsum("pi,poi->po", of_pairs.double(), weight.double().view(EXPERTS, SIZE, -1)[chosen.flatten()])
    assert_close(multiply_experts(of_pairs, packed, plan, shares), exact * shares.view(-1, 1))


@pytest.mark.parametrize("num_experts", [1, 6, 128])
@pytest.mark.parametrize("tokens", [1, 40, 500])
@pytest.mark.parametrize("is_even", [True, False], ids=["all experts", "one expert"])
def test_tiles_have_each_pair_once_and_one_expert_each(num_experts: int, tokens: int, is_even: bool) -> None:
    chosen = choose(tokens, min(4, num_experts), num_experts)
    chosen = chosen if is_even else torch.full_like(chosen, num_experts - 1)
    plan = plan_tiles(chosen, num_experts)
    found = []
    for expert, first, count in plan.tiles.tolist():
        pairs = plan.order[first : first + count].tolist()
        assert len(pairs) == count <= (64 if plan.has_many else 16)
        assert {chosen.flatten()[pair].item() for pair in pairs} <= {expert}
        found += pairs
    assert sorted(found) == list(range(chosen.numel()))
