"""Compares products of weights in 4 and 8 bits with plain ones, on a GPU or otherwise in Triton's interpreter."""

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, DTYPES, ON_DEVICE, assert_close, random
from torch.nn import functional

from conveyor_engine.execution.kernels import packed_product
from conveyor_engine.execution.kernels.few_rows import Norm
from conveyor_engine.execution.kernels.packed_product import multiply, restore
from conveyor_engine.execution.kernels.packed_row import multiply_packed_row
from conveyor_engine.execution.kernels.weights import Kind, Weights, has_kernels, join_weights, pack_weights
from conveyor_engine.execution.models.gpu_linear import GpuLinear

pytestmark = ON_DEVICE

SIZE, COLUMNS = 70, 640  # outputs, no multiple of a tile; inputs
CASES = pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [
        ("int4", 32, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("int4", 64, False), ("int4", 128, True), ("int4", COLUMNS, False), ("int8", 32, False))
        ),
        ("int8", COLUMNS, False),
        ("fp8", 128, False),
    ],
)


def make(kind: Kind, group: int, has_zeros: bool = False, size: int = SIZE) -> tuple[Weights, torch.Tensor]:
    """Return packed weights and what they stand for."""
    torch.manual_seed(0)
    groups = COLUMNS // group
    scales, zeros = (torch.rand(size, groups) + 0.1) * COLUMNS**-0.5 / 8, None
    if kind == "fp8":
        numbers = torch.arange(size * COLUMNS).mul(37).remainder(256).to(torch.uint8).view(size, COLUMNS)
        numbers[(numbers & 127) == 127] = 0  # these are NaN
        values, scales = numbers.view(torch.float8_e4m3fn).float(), scales / 8
    else:
        numbers = torch.randint(0, 1 << int(kind[3:]), (size, COLUMNS), dtype=torch.uint8)
        if has_zeros:
            zeros = torch.randint(0, 17, (size, groups))  # GPTQ's first version stores zeros less 1
        middle = torch.full((size, groups), 1 << int(kind[3:]) - 1) if zeros is None else zeros
        values = numbers.float() - middle.repeat_interleave(group, 1)
    packed = pack_weights(kind, numbers.to(DEVICE), scales.to(DEVICE), None if zeros is None else zeros.to(DEVICE))
    assert (packed.out_features, packed.in_features, packed.group) == (size, COLUMNS, group)
    return packed, (values * scales.repeat_interleave(group, 1)).to(DEVICE)


@CASES
def test_packed_weights_have_the_values_of_their_numbers(kind: Kind, group: int, has_zeros: bool) -> None:
    packed, weight = make(kind, group, has_zeros)
    torch.testing.assert_close(restore(packed, torch.float32), weight, rtol=1e-6, atol=0)
    joined = join_weights([packed, packed])
    assert torch.equal(restore(joined, torch.float32), restore(packed, torch.float32).repeat(2, 1))
    assert joined.num_bytes == 2 * packed.num_bytes


@DTYPES
@CASES
@pytest.mark.parametrize("rows", [1, 7, 65, 300, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 16, 64))])
def test_rows_are_multiplied(dtype: torch.dtype, kind: Kind, group: int, has_zeros: bool, rows: int) -> None:
    packed, weight = make(kind, group, has_zeros)
    x, bias, residual = (random(*shape, dtype=dtype) for shape in ((rows, COLUMNS), (SIZE,), (rows, SIZE)))
    exact = x.double() @ weight.double().t()
    assert_close(multiply(x, packed), exact)
    assert_close(multiply(x, packed, bias, residual), exact + bias.double() + residual.double())


def test_no_rows_give_no_results() -> None:
    packed, _ = make("int4", 64)
    linear = GpuLinear(packed, None, torch.float32)
    x, residual = (torch.empty(1, 0, size, device=DEVICE) for size in (COLUMNS, SIZE))
    assert linear(x).shape == linear.add_to(residual, x).shape == residual.shape


@DTYPES
@CASES
@pytest.mark.parametrize("offset", [None, 1.0], ids=str)
def test_a_row_is_normed_and_multiplied(
    dtype: torch.dtype, kind: Kind, group: int, has_zeros: bool, offset: float | None
) -> None:
    packed, weight = make(kind, group, has_zeros)
    x, bias, residual = (random(*shape, dtype=dtype) for shape in ((1, COLUMNS), (SIZE,), (1, SIZE)))
    norm = None if offset is None else Norm(random(COLUMNS, dtype=dtype), 0.1, offset)
    normed = x.double()
    if norm is not None:
        normed = normed * (normed.pow(2).mean() + 0.1).rsqrt() * (1 + norm.weight.double())
    exact = functional.linear(normed.to(dtype).double(), weight.double(), bias.double())
    assert_close(multiply_packed_row(x, packed, bias, norm=norm), exact)
    assert_close(multiply_packed_row(x, packed, bias, norm=norm, residual=residual), exact + residual.double())
    gate, up = exact.chunk(2, dim=-1)
    assert_close(multiply_packed_row(x, packed, bias, norm=norm, gated=True), gate * gate.sigmoid() * up)


def test_many_rows_restore_a_part_of_the_outputs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_product, "_RESTORED", 32 * COLUMNS)
    packed, weight = make("int4", 64)
    x, residual = random(300, COLUMNS, dtype=torch.float32), random(300, SIZE, dtype=torch.float32)
    assert_close(multiply(x, packed, None, residual), x.double() @ weight.double().t() + residual.double())


@pytest.mark.parametrize(
    ("kind", "columns", "groups"), [("int4", 96, 3), ("int4", 128, 8), ("int4", 192, 2), ("int8", 96, 5)]
)
def test_there_are_no_kernels_for_other_groups(kind: Kind, columns: int, groups: int) -> None:
    assert not has_kernels(kind, columns, groups)
