"""Tests products with AMX's tiles. On a CPU without AMX, test_emulated_tiles.py runs these tests."""

import pytest
import torch
from tests.engine.execution.models.families import logits_of, make_model, relative_error
from tests.engine.execution.native.checks import RUNS, assert_close, random
from torch.nn import functional

from conveyor_engine.execution import native
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.native import library

pytestmark = [*RUNS, pytest.mark.parametrize("isa", ["amx"], indirect=True)]

BFLOAT16 = torch.bfloat16


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Compute the product into y, as a layer does."""
    packed = native.pack_linear(weight)
    bias_at, residual_at = (None if each is None else each.data_ptr() for each in (bias, residual))
    call = packed.product(
        x.dtype, x=x.data_ptr(), bias=bias_at, residual=residual_at, y=y.data_ptr(), rows=x.shape[0],
        x_stride=x.stride(0), y_stride=y.stride(0),
    )  # fmt: skip
    library.load().cv_run_linear(call)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 70])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (40, 64), (96, 96), (70, 1024), (33, 1056), (50, 1040)])
def test_a_product_equals_its_definition(rows: int, n: int, k: int) -> None:
    x, weight, bias = (random(*shape, dtype=BFLOAT16, seed=k) for shape in ((rows, k), (n, k), (n,)))
    exact = functional.linear(x.double(), weight.double(), bias.double())
    assert_close(native.linear(x, native.pack_linear(weight), bias), exact)


@pytest.mark.parametrize("rows", [7, 37])
def test_rows_may_lie_apart_and_a_residual_where_the_result_goes(rows: int) -> None:
    wide, weight = random(rows, 200, dtype=BFLOAT16), random(45, 64, dtype=BFLOAT16)
    bias, before = random(45, dtype=BFLOAT16), random(rows, 50, dtype=BFLOAT16, seed=4)
    x, y = wide[:, 60:124], before.clone()[:, :45]
    product(x, weight, bias, y, residual=y)
    assert_close(y, functional.linear(x.double(), weight.double(), bias.double()) + before[:, :45].double())
    assert torch.equal(y._base[:, 45:], before[:, 45:]), "what lies between rows stays"
    assert torch.equal(wide, random(rows, 200, dtype=BFLOAT16))


def test_a_long_prompt_is_cut_into_blocks() -> None:
    x, weight = random(300, 4096, dtype=BFLOAT16), random(64, 4096, dtype=BFLOAT16, seed=1)
    packed = native.pack_linear(weight)
    whole = native.linear(x, packed)
    assert_close(whole, functional.linear(x.double(), weight.double()))
    assert torch.equal(native.linear(x[250:], packed), whole[250:])


def test_a_row_gives_the_same_bits_alone_and_among_any_number_of_others() -> None:
    """In sums that cancel, only rounding errors remain. Another order of addition would change them."""
    x, weight = random(70, 160, dtype=BFLOAT16), random(45, 160, dtype=BFLOAT16, seed=1)
    x, packed = torch.cat([x, x], 1), native.pack_linear(torch.cat([weight, -weight], 1))
    whole = native.linear(x, packed)
    assert 0 < whole.abs().max() < 1e-4
    for rows in range(1, 71):
        assert torch.equal(native.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(native.linear(x[rows - 1 : rows], packed), whole[rows - 1 : rows])


def test_threads_give_the_same_bits_as_one() -> None:
    x, packed = random(40, 256, dtype=BFLOAT16), native.pack_linear(random(1000, 256, dtype=BFLOAT16, seed=1))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = native.linear(x, packed)
        torch.set_num_threads(4)
        assert torch.equal(native.linear(x, packed), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [3, 16, 21, 50])
def test_what_is_not_finite_stays_in_its_row_and_its_column(rows: int) -> None:
    x, weight = random(rows, 64, dtype=BFLOAT16), random(48, 64, dtype=BFLOAT16, seed=1)
    clean = native.linear(x, native.pack_linear(weight))
    in_rows, in_columns = x.clone(), weight.clone()
    in_rows[1, 5], in_rows[rows - 1, 40] = torch.nan, torch.inf
    in_columns[37, 63] = torch.nan
    for y, row, column in (
        (native.linear(in_rows, native.pack_linear(weight)), {1, rows - 1}, set(range(48))),
        (native.linear(x, native.pack_linear(in_columns)), set(range(rows)), {37}),
        (native.linear(x, native.pack_linear(weight)), set(), set()),  # where the previous cases were computed
    ):
        touched = torch.zeros(rows, 48, dtype=torch.bool)
        touched[torch.tensor([*row], dtype=torch.long)[:, None], torch.tensor([*column], dtype=torch.long)] = True
        assert torch.equal(~y.isfinite(), touched)
        assert torch.equal(y[~touched], clean[~touched])


def test_weights_that_are_not_finite_do_not_reach_rows_that_are_not_there() -> None:
    weight = torch.full((32, 32), torch.inf, dtype=BFLOAT16)
    y = torch.zeros(5, 32, dtype=BFLOAT16)
    product(torch.ones(3, 32, dtype=BFLOAT16), weight, None, y[:3], None)
    assert y.isinf().any(dim=1).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_whole_model_answers_as_without_tiles(family: str) -> None:
    model = make_model(family).bfloat16()
    exact = logits_of(make_model(family).bfloat16().float())
    fuse_model(model)
    assert all(type(layer) is NativeDecoderLayer for layer in model.model.layers)
    by_tiles = logits_of(model)
    assert native.use_isa("avx512bf16")
    by_pairs = logits_of(model)
    assert relative_error(by_tiles, exact) <= 1.5 * relative_error(by_pairs, exact)
    assert relative_error(by_tiles, by_pairs) < 0.03
