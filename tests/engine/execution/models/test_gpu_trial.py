"""Tests that the trial of kernels for few bits reaches each of them, and that no wrong one is used."""

from typing import Any

import pytest
import torch
from tests.engine.execution.interpreter import ON_DEVICE
from tests.engine.execution.models.deferred_layers import defer, pack
from tests.engine.execution.models.families import logits_of, make_model, relative_error
from torch import nn

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.kernels import packed_product, packed_row
from conveyor_engine.execution.kernels.weights import Weights
from conveyor_engine.execution.models import gpu_trial
from conveyor_engine.execution.models.quantized.rounding import Grid, choose_grid

# From the sigmoid of a large negative number, which is correctly 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("few_rows"),
    *ON_DEVICE,
]


TRIED_ROWS = gpu_trial._TRIED_ROWS


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed_product.multiply
    monkeypatch.setattr(packed_product, "multiply", lambda x, *others: right(x, *others) + (len(x) > 200))
    model = make_model("Qwen3", intermediate_size=128, num_hidden_layers=1)
    expected = logits_of(model)
    with pytest.raises(ConfigError, match="only 0 % of the weights of Qwen3ForCausalLM"):
        pack(model, "int4")
    for linear in (part for part in model.modules() if type(part) is nn.Linear):
        defer(linear, choose_grid(linear.weight.data, 8, 32))
    lines = pack(model)
    assert len(lines) == 2, "one for each number of groups"
    assert lines[0].startswith('event=weights_keep_16_bits found="int8 in groups of 32: 257 rows" consequence=')
    assert relative_error(logits_of(model), expected) < 0.05


@pytest.mark.parametrize("part", ["32 rows", "add_to", "norm", "gated"])
def test_a_trial_reaches_each_kernel(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """And it computes only the first outputs of a layer."""
    multiply, multiply_row, tried = packed_product.multiply, packed_row.multiply_packed_row, list[int]()

    def wrong(x: torch.Tensor, weights: Weights, bias: Any, residual: Any = None) -> torch.Tensor:
        tried.append(weights.out_features)
        return multiply(x, weights, bias, residual) + (
            len(x) == 32 if part == "32 rows" else part == "add_to" and residual is not None
        )

    def wrong_row(*given: Any, **options: Any) -> torch.Tensor:
        return multiply_row(*given, **options) + (options.get(part, False) not in (False, None))

    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1, 32) if part == "32 rows" else (1,))
    assert {1, 16, 32, 64, 257} == {*TRIED_ROWS}
    monkeypatch.setattr(gpu_trial, "_TRIED_OUTPUTS", 16)
    monkeypatch.setattr(packed_product, "multiply", wrong)
    monkeypatch.setattr(packed_row, "multiply_packed_row", wrong_row)
    model: Any = nn.Module()
    model.proj = nn.Linear(64, 18, bias=False)
    defer(model.proj, choose_grid(model.proj.weight.data, 8, 64))
    lines = pack(model)
    assert lines[0].startswith("event=weights_keep_16_bits ")
    assert type(model.proj) is nn.Linear
    assert {*tried} == {16}


def test_each_number_of_inputs_has_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(gpu_trial, "_is_same", lambda ours, *_: not tried.append(ours.in_features))  # type: ignore[func-returns-value]
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1,))
    model: Any = nn.Module()
    for name, columns in (("up", 64), ("down", 96), ("again", 64)):
        linear = nn.Linear(columns, 32, bias=False)
        defer(linear, Grid(8, torch.ones(32, 1)))
        model.add_module(name, linear)
    pack(model)
    assert tried == [64, 96]
