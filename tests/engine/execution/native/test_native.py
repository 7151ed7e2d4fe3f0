"""Compares the compiled CPU kernels with torch in float64, on every instruction set of this CPU."""

import pytest
import torch
from tests.engine.execution.native.checks import DTYPES, RUNS, Sequences, assert_close, random
from torch.nn import functional

from conveyor_engine.execution import native

pytestmark = RUNS


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 9), (32, 64), (33, 63), (100, 257)])
def test_linear_equals_torch_for_every_number_of_rows(dtype: torch.dtype, n: int, k: int) -> None:
    weight = random(n, k, dtype=dtype, seed=1)
    packed = native.pack_linear(weight)
    for rows in range(1, 27):
        x = random(rows, k, dtype=dtype)
        assert_close(native.linear(x, packed), functional.linear(x.double(), weight.double()))


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 9), (64, 64), (100, 257)])
def test_packed_weights_are_had_again_as_they_were(dtype: torch.dtype, n: int, k: int) -> None:
    weight = random(n, k, dtype=dtype)
    assert torch.equal(native.unpack_linear(native.pack_linear(weight)), weight)


@DTYPES
def test_linear_cuts_a_long_prompt_into_blocks(dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((531, 1030), (70, 1030), (70,)))
    exact = functional.linear(x.double(), weight.double(), bias.double())
    assert_close(native.linear(x, native.pack_linear(weight), bias), exact)


@DTYPES
def test_linear_takes_a_slice_of_a_wider_tensor_and_leading_dimensions(dtype: torch.dtype) -> None:
    wide, weight = random(1, 5, 96, dtype=dtype), random(40, 32, dtype=dtype)
    x = wide[..., 32:64]
    actual = native.linear(x, native.pack_linear(weight))
    assert actual.shape == (1, 5, 40)
    assert_close(actual, functional.linear(x.double(), weight.double()))


@DTYPES
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    packed = native.pack_linear(random(40, 32, dtype=dtype))
    assert native.linear(torch.empty(1, 0, 32, dtype=dtype), packed).shape == (1, 0, 40)
    assert native.rms_norm(torch.empty(1, 0, 32, dtype=dtype), torch.ones(32, dtype=dtype), 1e-5).shape == (1, 0, 32)
    assert native.silu_mul(torch.empty(1, 0, 32, dtype=dtype)).shape == (1, 0, 16)
    empty = torch.empty(1, 0, 8, dtype=dtype)
    assert native.rope(torch.empty(0, 2, 8, dtype=dtype), empty, empty).shape == (0, 2, 8)


@DTYPES
def test_linear_lets_nan_through(dtype: torch.dtype) -> None:
    x, weight = random(3, 32, dtype=dtype), random(32, 32, dtype=dtype)
    x[1, 5] = torch.nan
    y = native.linear(x, native.pack_linear(weight))
    assert y.isnan().any(dim=1).tolist() == [False, True, False]


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 15, 64, 100, 1024])
def test_rms_norm_equals_its_definition(dtype: torch.dtype, offset: float, size: int) -> None:
    x, weight = random(37, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.double() + offset)
    assert_close(native.rms_norm(x, weight, 1e-5, offset), exact)


@DTYPES
def test_rms_norm_of_heads_inside_a_merged_projection(dtype: torch.dtype) -> None:
    merged, weight = random(9, 8 * 24, dtype=dtype), random(24, dtype=dtype, seed=1)
    heads = merged[:, 48:144].view(9, 4, 24)
    assert not heads.is_contiguous()
    exact = heads.double() * (heads.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert_close(native.rms_norm(heads, weight, 1e-6), exact)


@DTYPES
@pytest.mark.parametrize("size", [1, 17, 3072])
def test_silu_mul_equals_torch(dtype: torch.dtype, size: int) -> None:
    x = 8 * random(1, 7, 2 * size, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(native.silu_mul(x), functional.silu(gate) * up)


@DTYPES
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32), (20, 20), (128, 128)])
def test_rope_rotates_the_first_dimensions_and_copies_the_rest(dtype: torch.dtype, head_dim: int, rotary: int) -> None:
    x = random(11, 5, head_dim, dtype=dtype)[:, 1:4]
    angles = torch.arange(11)[:, None] * 10000 ** -(torch.arange(rotary // 2) / rotary * 2)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(dtype)[None] for f in (torch.cos, torch.sin))
    rotated, rest = x.double().split([rotary, head_dim - rotary], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    exact = rotated * cos[0, :, None].double() + torch.cat([-second, first], -1) * sin[0, :, None].double()
    assert_close(native.rope(x, cos, sin), torch.cat([exact, rest], -1))


MIXED = [(1, 1), (1, 16), (1, 17), (1, 130), (1, 64), (1, 65), (5, 5), (70, 70), (33, 100), (16, 16)]


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1), (14, 2)], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (20, 20), (96, 80), (9, 7)], ids=str)
def test_attention_over_decodes_and_prompts_equals_the_definition(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, value_dim: int
) -> None:
    batch = Sequences(MIXED, heads, kv_heads, dim, value_dim, dtype)
    assert_close(batch.attend(), batch.exact())


@DTYPES
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [(4, 64, 64), (2, 9, 7)], ids=str)
def test_attention_that_is_not_causal_sees_whole_sequences(
    dtype: torch.dtype, heads: int, dim: int, value_dim: int
) -> None:
    lengths = [(n, n) for n in (1, 2, 15, 16, 17, 64, 65, 130)]
    batch = Sequences(lengths, heads, heads, dim, value_dim, dtype)
    assert_close(batch.attend(causal=False), batch.exact(causal=False))
    assert (batch.exact(causal=False) - batch.exact()).abs().max() > 0.1  # and it does matter


@DTYPES
@pytest.mark.parametrize("window", [1, 5, 16, 63, 1000])
def test_attention_sees_no_further_than_its_window(dtype: torch.dtype, window: int) -> None:
    batch = Sequences(MIXED, 4, 2, 32, 32, dtype)
    assert_close(batch.attend(window=window), batch.exact(window=window))


@DTYPES
def test_attention_caps_its_scores(dtype: torch.dtype) -> None:
    batch = Sequences(MIXED, 4, 2, 32, 32, dtype)
    exact = batch.exact(softcap=2.0, window=20)
    assert_close(batch.attend(softcap=2.0, window=20), exact)
    assert (batch.attend(window=20).double() - exact).abs().max() > 0.1  # and the cap did matter


@DTYPES
@pytest.mark.parametrize(("window", "causal"), [(None, True), (20, True), (20, False)])
def test_attention_adds_sinks_to_the_softmax(dtype: torch.dtype, window: int | None, causal: bool) -> None:
    batch = Sequences(MIXED, 4, 2, 32, 32, dtype)
    sinks = torch.tensor([0.5, -torch.inf, 3.0, -2.0], dtype=dtype)
    exact = batch.exact(window=window, causal=causal, sinks=sinks)
    assert_close(batch.attend(window=window, causal=causal, sinks=sinks), exact)
    assert (batch.attend(window=window, causal=causal).double() - exact).abs().max() > 0.1  # and the sinks did matter


@DTYPES
@pytest.mark.parametrize("window", [None, 5, 63])
def test_attention_sees_keys_up_to_the_end_of_each_token(dtype: torch.dtype, window: int | None) -> None:
    batch = Sequences([(3, 40), (130, 130), (1, 33), (200, 310)], 4, 2, 32, 32, dtype)
    ends = torch.cat([torch.arange(total - queries, total) + 1 for queries, total in batch.lengths]).int()
    ends[3 + 10 : 3 + 90], ends[134:334] = 90, 310  # an image amid a sequence, and one that is all of its queries
    exact = batch.exact(window=window, ends=ends)
    assert_close(batch.attend(window=window, ends=ends), exact)
    assert (batch.exact(window=window) - exact).abs().max() > 0.1


@DTYPES
def test_attention_with_more_query_heads_per_kv_head_than_a_tile_has_rows(dtype: torch.dtype) -> None:
    batch = Sequences([(3, 40), (1, 33)], 71, 1, 16, 16, dtype)
    assert_close(batch.attend(), batch.exact())


@DTYPES
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (71, 1), (48, 1), (12, 2), (128, 1)], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(96, 64), (24, 16), (21, 9)], ids=str)
def test_attention_over_values_that_are_the_first_numbers_of_their_keys(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, value_dim: int
) -> None:
    batch = Sequences(MIXED, heads, kv_heads, dim, value_dim, dtype, values_are_keys=True)
    assert batch.caches[0].numel() == 0
    assert_close(batch.attend(), batch.exact())
    sinks = torch.linspace(-2, 3, heads).to(dtype)
    assert_close(batch.attend(20, 2.0, sinks=sinks), batch.exact(20, 2.0, sinks=sinks))


@DTYPES
def test_each_head_is_multiplied_by_its_own_matrix(dtype: torch.dtype) -> None:
    x, weights = random(5, 3, 40, dtype=dtype)[..., :24], random(3, 50, 24, dtype=dtype, seed=1)
    y = torch.zeros(5, 3, 60, dtype=dtype)
    native.PackedHeads(weights).run(x, y[..., 4:54])
    assert_close(y[..., 4:54], torch.einsum("thi,hoi->tho", x.double(), weights.double()))
    assert not y[..., :4].any()
    assert not y[..., 54:].any()


def test_attention_survives_scores_far_from_zero() -> None:
    batch = Sequences(MIXED, 4, 2, 32, 32, torch.float32)
    assert_close(batch.attend(scaling=40.0), batch.exact(scaling=40.0), tolerance=1e-3)


def test_padding_after_the_last_sequence_gets_zeros_and_a_negative_slot_is_not_written() -> None:
    batch = Sequences([(1, 3), (4, 4)], 2, 1, 8, 8, torch.float32)
    exact = batch.exact()
    batch.query = torch.cat([batch.query, torch.full((2, 2, 8), torch.nan)])
    before = [cache.clone() for cache in batch.caches]
    poison = torch.full((2, 1, 8), torch.nan)
    native.kv_write(poison, poison, torch.tensor([-1, -1]), batch.caches)
    for cache, old in zip(batch.caches, before, strict=True):
        assert torch.equal(cache.nan_to_num(7), old.nan_to_num(7))
    actual = batch.attend()
    assert_close(actual[:5], exact)
    assert not actual[5:].any()


def test_an_unknown_instruction_set_is_refused() -> None:
    assert not native.use_isa("avx9000")
