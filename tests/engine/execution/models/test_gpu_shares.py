"""Tests weights of few bits that ranks share, and those whose columns are sorted by group."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, ON_DEVICE
from tests.engine.execution.models.deferred_layers import defer, pack
from torch import nn

from conveyor_engine.execution.models import divide, gpu_trial
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.linear import build_linear, stackable
from conveyor_engine.execution.models.quantized.rounding import Grid, choose_grid

# From the sigmoid of a large negative number, which is correctly 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("few_rows"),
    *ON_DEVICE,
]


FP8_ROWS = Grid(8, torch.linspace(0.5, 2, 64)[:, None].repeat(1, 2), is_float=True)


@torch.inference_mode()
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("grid", [choose_grid(torch.randn(64, 256), 4, 32), FP8_ROWS], ids=["int4", "fp8"])
def test_ranks_pack_their_shares(grid: Grid, dim: int) -> None:
    torch.manual_seed(0)
    for rank in range(2):
        model: Any = nn.Module()
        model.proj = nn.Linear(256, 64, bias=False)
        weight = defer(model.proj, grid)
        divide._keep_share(model.proj, dim, rank, 2)
        pack(model)
        assert isinstance(model.proj, GpuLinear)
        torch.testing.assert_close(model.proj.weight.cpu(), weight.chunk(2, dim)[rank], rtol=1e-6, atol=0)


@torch.inference_mode()
def test_shares_without_whole_groups_keep_16_bits() -> None:
    model: Any = nn.Module()
    model.proj = nn.Linear(96, 64, bias=False)
    weight = defer(model.proj, choose_grid(model.proj.weight.data, 8, 32))
    divide._keep_share(model.proj, 1, 0, 2)
    pack(model)
    assert torch.equal(model.proj.weight.cpu(), weight[:, :48])


def make_ordered(seed: int) -> tuple[nn.Linear, torch.Tensor]:
    """Return a layer of 64 inputs whose groups have columns from everywhere, and its weight."""
    linear = nn.Linear(64, 16, bias=False)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    grid = replace(choose_grid(linear.weight.data, 4, 32), order=order)
    sorted_weight = defer(linear, grid, torch.randint(0, 16, (16, 64), dtype=torch.uint8))
    return linear, sorted_weight[:, order.argsort()]


def test_layers_with_sorted_columns_are_joined_if_they_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As queries, keys and values of GPTQ have with `desc_act`."""
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1, 2))
    model, weights = nn.Module(), list[torch.Tensor]()
    for name, seed in (("queries", 0), ("keys", 0), ("others", 1)):
        linear, weight = make_ordered(seed)
        model.add_module(name, linear)
        weights.append(weight)
    pack(model)
    queries, keys, others = (getattr(model, name) for name in ("queries", "keys", "others"))
    assert not stackable([queries, others])
    joined = build_linear([queries, keys])
    torch.testing.assert_close(joined.weight.cpu(), torch.cat(weights[:2]), rtol=1e-6, atol=0)
    for rows in (1, 3):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(joined(x.to(DEVICE)).cpu(), x @ torch.cat(weights[:2]).t(), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("dim", [0, 1])
def test_shares_of_the_inputs_of_sorted_columns_keep_16_bits(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1,))
    model: Any = nn.Module()
    model.proj, weight = make_ordered(0)
    divide._keep_share(model.proj, dim, 1, 2)
    pack(model)
    assert isinstance(model.proj, GpuLinear) == (dim == 0)
    if dim == 0:
        torch.testing.assert_close(model.proj.weight.cpu(), weight[8:], rtol=1e-6, atol=0)
