"""Tests products with weights of 4 to 8 bits, for each instruction set that this CPU has."""

import pytest
import torch
from tests.engine.execution.native.checks import DTYPES, RUNS, assert_close, random

from conveyor_engine.execution import native
from conveyor_engine.execution.native import library

pytestmark = RUNS

BITS = pytest.mark.parametrize("bits", [8, 6, 5, 4])
SHAPES = pytest.mark.parametrize(("n", "k", "group"), [(40, 96, 32), (70, 192, 64), (33, 512, 128), (96, 192, 192)])


def make_weight(
    n: int, k: int, bits: int, group: int, *, scale_dtype: torch.dtype = torch.bfloat16, has_zeros: bool = False
) -> native.PackedIntegers:
    """Return random numbers, scales and zero points. Both ends of the range occur."""
    generator, rows = torch.Generator().manual_seed(n + k), -(-n // native.PANEL) * native.PANEL
    numbers = torch.randint(0, 1 << bits, (rows, k), generator=generator, dtype=torch.uint8)
    numbers[:, 0], numbers[:, 1] = 0, (1 << bits) - 1
    scales = (torch.rand(rows, k // group, generator=generator) + 0.1).to(scale_dtype)
    zeros = torch.randint(-9, 1 << bits, scales.shape, generator=generator, dtype=torch.int16) if has_zeros else None
    weight = native.PackedIntegers.allocate((n, k), bits, group, scale_dtype, has_zeros=has_zeros)
    weight.fill(0, numbers, scales, zeros)
    middle = 1 << bits - 1 if zeros is None else zeros[..., None]
    plain = (numbers.view(rows, -1, group).float() - middle) * scales[..., None].float()
    assert torch.equal(native.unpack_integers(weight), plain.view(rows, k)[:n])
    return weight


def make_blocks(n: int, k: int, bits: int, group: int, *, has_minima: bool) -> native.PackedIntegers:
    """Return weights whose scales, and minima, are whole numbers, as in the K types of GGUF files."""
    generator, rows = torch.Generator().manual_seed(n + k), -(-n // native.PANEL) * native.PANEL
    numbers = torch.randint(0, 1 << bits, (rows, k), generator=generator, dtype=torch.uint8)
    scales, minima = torch.randint(-128, 128, (2, rows, k // group), generator=generator, dtype=torch.int8)
    factors = torch.rand(rows, k // 256, 1 + has_minima, generator=generator).half()
    factors[:, 0] *= 2.0**-14  # float16 has subnormal numbers, which such files use
    weight = native.PackedIntegers.allocate((n, k), bits, group, torch.int8, has_minima=has_minima)
    weight.fill(0, numbers, scales, None, minima if has_minima else None, factors)
    wide = factors.double().repeat_interleave(256 // group, 1)
    plain = numbers.view(rows, -1, group).double() - (0 if has_minima else 1 << bits - 1)
    plain *= (scales.double() * wide[..., 0])[..., None]
    if has_minima:
        plain -= (minima.double() * wide[..., 1])[..., None]
    torch.testing.assert_close(native.unpack_integers(weight).double(), plain.view(rows, k)[:n], rtol=0, atol=2e-3)
    return weight


def multiply(x: torch.Tensor, weight: native.PackedIntegers) -> torch.Tensor:
    """Compute the product's definition in float64: rows are rounded to 8 bits, each group by its largest number.

    With scales that are whole numbers, these groups have 256 inputs.
    """
    grouped = x.double().view(len(x), -1, 256 if weight.scale_dtype == torch.int8 else weight.group)
    scales = grouped.abs().amax(dim=2, keepdim=True) / 127
    rounded = (grouped / scales).round() * scales
    return rounded.nan_to_num(0).view(x.shape) @ native.unpack_integers(weight).double().t()


@BITS
@DTYPES
@SHAPES
def test_a_product_equals_its_definition(bits: int, dtype: torch.dtype, n: int, k: int, group: int) -> None:
    weight, bias = make_weight(n, k, bits, group), random(n, dtype=dtype, seed=3)
    for rows in (1, 2, 3, 4, 5, 6, 7, 16, 17, 33, 70):
        x = random(rows, k, dtype=dtype, seed=rows)
        assert_close(
            native.linear(x, weight, bias),
            multiply(x, weight) + bias.double(),
            2e-5 if dtype == torch.float32 else None,
        )


@BITS
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scales_have_three_types_and_zero_points_any_value(bits: int, scale_dtype: torch.dtype) -> None:
    weight = make_weight(70, 256, bits, 64, scale_dtype=scale_dtype, has_zeros=True)
    for rows in (1, 9, 40):
        x = random(rows, 256, dtype=torch.float32, seed=rows)
        assert_close(native.linear(x, weight), multiply(x, weight), 2e-5)


@pytest.mark.parametrize(
    ("bits", "group", "has_minima"),
    [(4, 32, True), (5, 32, True), (6, 16, False), (6, 16, True)],
    ids=["Q4_K", "Q5_K", "Q6_K", "both"],
)
def test_scales_and_minima_of_blocks_are_whole_numbers_of_a_factor(bits: int, group: int, has_minima: bool) -> None:
    weight = make_blocks(70, 768, bits, group, has_minima=has_minima)
    x = random(40, 768, dtype=torch.float32)
    whole = native.linear(x, weight)
    assert_close(whole, multiply(x, weight), 2e-5)
    for rows in (1, 3, 9, 17):
        assert torch.equal(native.linear(x[:rows], weight), whole[:rows])


@BITS
def test_rows_may_lie_apart_and_a_residual_where_the_result_goes(bits: int) -> None:
    weight = make_weight(45, 128, bits, 64)
    for rows in (2, 37):
        wide, before = random(rows, 300, dtype=torch.bfloat16), random(rows, 50, dtype=torch.bfloat16, seed=4)
        x, y = wide[:, 60:188], before.clone()[:, :45]
        call = weight.product(
            x.dtype, x=x.data_ptr(), residual=y.data_ptr(), y=y.data_ptr(), rows=rows, x_stride=300, y_stride=50
        )
        library.load().cv_run_linear(call)
        assert_close(y, multiply(x.contiguous(), weight) + before[:, :45].double())
        assert torch.equal(y._base[:, 45:], before[:, 45:]), "what lies between rows stays"


@BITS
def test_a_row_gives_the_same_bits_alone_and_among_any_number_of_others(bits: int) -> None:
    x, weight = random(70, 256, dtype=torch.float32), make_weight(45, 256, bits, 64)
    whole = native.linear(x, weight)
    for rows in range(1, 71):
        assert torch.equal(native.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(native.linear(x[rows - 1 : rows], weight), whole[rows - 1 : rows])


@BITS
def test_a_long_prompt_is_cut_into_blocks_and_shared_among_threads(bits: int) -> None:
    x, weight = random(300, 8192, dtype=torch.bfloat16), make_weight(64, 8192, bits, 128)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = native.linear(x, weight)
        torch.set_num_threads(3)
        assert torch.equal(native.linear(x, weight), alone)
    finally:
        torch.set_num_threads(before)
    assert_close(alone, multiply(x, weight))


@BITS
def test_what_is_not_finite_stays_in_its_row(bits: int) -> None:
    weight = make_weight(48, 128, bits, 64)
    for rows in (3, 21, 50):
        x = random(rows, 128, dtype=torch.bfloat16)
        clean = native.linear(x, weight)
        broken = x.clone()
        broken[1, 5], broken[rows - 1, 70] = torch.nan, torch.inf
        y = native.linear(broken, weight)
        is_broken = torch.zeros(rows, dtype=torch.bool)
        is_broken[[1, rows - 1]] = True
        assert torch.equal(~y.isfinite(), is_broken[:, None].expand_as(y))
        assert torch.equal(y[~is_broken], clean[~is_broken])


@BITS
def test_the_largest_numbers_do_not_overflow(bits: int) -> None:
    weight = native.PackedIntegers.allocate((32, 16384), bits, 16384, torch.float32)
    weight.fill(0, torch.full((32, 16384), (1 << bits) - 1, dtype=torch.uint8), torch.ones(32, 1))
    for rows in (1, 9):
        for sign in (1, -1):
            x = torch.full((rows, 16384), float(sign))
            assert_close(native.linear(x, weight), multiply(x, weight), 2e-6)


@pytest.mark.parametrize(("bits", "group", "has_minima"), [(4, 32, True), (5, 32, True), (6, 16, False)], ids=str)
def test_the_largest_numbers_of_blocks_do_not_overflow(bits: int, group: int, has_minima: bool) -> None:
    weight = native.PackedIntegers.allocate((32, 512), bits, group, torch.int8, has_minima=has_minima)
    scales = torch.full((32, 512 // group), -128, dtype=torch.int8)
    factors = torch.ones(32, 2, 1 + has_minima, dtype=torch.float16)
    for number in (0, (1 << bits) - 1):
        numbers = torch.full((32, 512), number, dtype=torch.uint8)
        weight.fill(0, numbers, scales, None, scales if has_minima else None, factors)
        for rows in (1, 9):
            for sign in (1, -1):
                x = torch.full((rows, 512), float(sign))
                assert_close(native.linear(x, weight), multiply(x, weight), 2e-6)


@BITS
def test_zeros_give_zero(bits: int) -> None:
    x = torch.zeros(9, 64, dtype=torch.bfloat16)
    assert not native.linear(x, make_weight(40, 64, bits, 32)).any()
