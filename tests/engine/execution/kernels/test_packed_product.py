"""Compares products of weights in 4 and 8 bits with plain ones, on a GPU or otherwise in Triton's interpreter."""

from typing import Literal

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, DTYPES, ON_DEVICE, assert_close, random
from torch.nn import functional

from conveyor_engine.execution.kernels import packed_product
from conveyor_engine.execution.kernels.few_rows import Norm
from conveyor_engine.execution.kernels.packed_product import multiply, restore
from conveyor_engine.execution.kernels.packed_row import multiply_packed_row
from conveyor_engine.execution.kernels.weights import Kind, Weights, has_blocks, has_kernels, join_weights, pack_weights
from conveyor_engine.execution.models.gpu_linear import GpuLinear

pytestmark = ON_DEVICE

SIZE, COLUMNS = 70, 768  # outputs, no multiple of a tile; inputs
Form = Literal["plain", "zeros", "minima", "blocks", "tensor"]
"""Of scales: `minima` and `blocks` are those of GGUF's K types, `tensor` those of NVFP4."""
CASES = pytest.mark.parametrize(
    ("kind", "group", "form"),
    [
        ("int4", 32, "zeros"),
        ("int4", 32, "minima"),
        ("int8", 16, "blocks"),
        ("fp4", 16, "tensor"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("int4", 64, "plain"), ("int4", 128, "zeros"), ("int4", COLUMNS, "plain"), ("int8", 32, "plain")),
                *(("int8", 32, "minima"), ("int8", 16, "minima"), ("fp4", 32, "plain"), ("int4", 16, "plain")),
            )
        ),
        ("int8", COLUMNS, "plain"),
        ("fp8", 128, "plain"),
    ],
)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make(kind: Kind, group: int, form: Form = "plain", size: int = SIZE) -> tuple[Weights, torch.Tensor]:
    """Return packed weights and what they stand for."""
    torch.manual_seed(0)
    numbers, values = _make_numbers(kind, size)
    scales, starts, factors = (torch.rand(size, COLUMNS // group) + 0.1) * COLUMNS**-0.5 / 8, None, None
    scales = scales / 8 if kind == "fp8" else scales
    wide, subtracted = scales, torch.full_like(scales, {"int4": 8, "int8": 128}.get(kind, 0))
    if form == "zeros":
        starts = torch.randint(0, 17, scales.shape, dtype=torch.uint8)  # GPTQ's first version stores zeros less 1
        subtracted = starts.float()
    elif form in ("minima", "blocks"):
        numbers, values = numbers & 63, values.remainder(64)
        scales = torch.randint(-60, 61, scales.shape, dtype=torch.int8)
        factors = ((torch.rand(size, COLUMNS // 256, 2 if form == "minima" else 1) + 0.5) / 4096).half()
        of_groups = factors.float().repeat_interleave(256 // group, 1)
        wide, subtracted = scales * of_groups[..., 0], torch.full_like(subtracted, 32)
        if form == "minima":
            starts, subtracted = torch.randint(0, 64, scales.shape, dtype=torch.int8), torch.zeros_like(subtracted)
    elif form == "tensor":
        scales, factors = (scales * 1000).to(torch.float8_e4m3fn), torch.rand(size, 1, 1) / 500
        wide = scales.float() * factors[..., 0]
        scales = scales.view(torch.uint8)
    weight = (values - subtracted.repeat_interleave(group, 1)) * wide.repeat_interleave(group, 1)
    if form == "minima":
        assert starts is not None
        weight -= (starts * of_groups[..., 1]).repeat_interleave(group, 1)
    parts = (None if part is None else part.to(DEVICE) for part in (numbers, scales, starts, factors))
    packed = pack_weights(kind, *parts, middle=int(subtracted[0, 0]) if kind == "int8" else 0)  # type: ignore[arg-type]
    assert (packed.out_features, packed.in_features, packed.group) == (size, COLUMNS, group)
    return packed, weight.to(DEVICE)


def _make_numbers(kind: Kind, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stored numbers, and what they stand for."""
    if kind == "fp8":
        numbers = torch.arange(size * COLUMNS).mul(37).remainder(256).to(torch.uint8).view(size, COLUMNS)
        numbers[(numbers & 127) == 127] = 0  # these are NaN
        return numbers, numbers.view(torch.float8_e4m3fn).float()
    numbers = torch.randint(0, 1 << int(kind[-1]), (size, COLUMNS), dtype=torch.uint8)
    return numbers, FP4[numbers.long()] if kind == "fp4" else numbers.float()


@CASES
def test_packed_weights_have_the_values_of_their_numbers(kind: Kind, group: int, form: Form) -> None:
    packed, weight = make(kind, group, form)
    torch.testing.assert_close(restore(packed, torch.float32), weight, rtol=1e-6, atol=0)
    joined = join_weights([packed, packed])
    assert torch.equal(restore(joined, torch.float32), restore(packed, torch.float32).repeat(2, 1))
    assert joined.num_bytes == 2 * packed.num_bytes


@DTYPES
@CASES
@pytest.mark.parametrize("rows", [1, 7, 300, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (2, 16, 64, 65))])
def test_rows_are_multiplied(dtype: torch.dtype, kind: Kind, group: int, form: Form, rows: int) -> None:
    packed, weight = make(kind, group, form)
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
@pytest.mark.parametrize("offset", [pytest.param(None, marks=pytest.mark.nightly), 1.0], ids=str)
def test_a_row_is_normed_and_multiplied(
    dtype: torch.dtype, kind: Kind, group: int, form: Form, offset: float | None
) -> None:
    packed, weight = make(kind, group, form)
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


def test_weights_with_blocks_are_joined_though_their_bits_differ() -> None:
    """As queries and values of Q4_K_M are."""
    parts = [make("int4", 32, "minima"), make("int8", 16, "blocks"), make("int8", 32, "minima")]
    joined = join_weights([packed for packed, _ in parts])
    assert (joined.kind, joined.group) == ("int8", 16)
    expected = torch.cat([weight for _, weight in parts])
    torch.testing.assert_close(restore(joined, torch.float32), expected, rtol=1e-5, atol=1e-6)
    assert has_blocks(joined)
    assert not has_blocks(make("int4", 32)[0])


@pytest.mark.parametrize(
    ("kind", "columns", "groups"),
    [("int4", 96, 3), ("int4", 128, 16), ("int4", 96, 2), ("int8", 96, 5), ("fp4", 48, 3)],
)
def test_there_are_no_kernels_for_other_groups(kind: Kind, columns: int, groups: int) -> None:
    assert not has_kernels(kind, columns, groups)
