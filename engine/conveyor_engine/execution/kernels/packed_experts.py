"""Multiplies tokens with the experts that a router chose for them, whose weights of 4 or 8 bits stay so in memory.

A pair is a token and one of its experts. Pairs are sorted by their experts and divided into tiles with one expert each.
A kernel finds the tiles on the device, so that a step reads nothing from it. The kernel for products is that of
`packed_product`, with other rows and weights for each tile.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.packed_product import NUM_STAGES, list_tensors, name_form, sum_products
from conveyor_engine.execution.kernels.part import capability
from conveyor_engine.execution.kernels.weights import Weights

MANY = 16  # pairs for each expert, on average: more have larger tiles
_TILES = (16, 64, 4), (64, 128, 8)  # rows, outputs, warps; for few pairs and for many
_SMALLER_TILES = (16, 32, 4), (64, 64, 4)  # larger ones would spill registers with zeros or minima on 12.0
_PLANNED = 32  # tiles of a program


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the products of a step are.

    order: the numbers of the pairs, (pairs,), sorted by expert. tiles: int32 (tiles, 3), each with an expert, its first
    place in `order` and its number of pairs, which is 0 for tiles that are not needed.
    """

    order: torch.Tensor
    tiles: torch.Tensor
    num_experts: int
    has_many: bool


@triton.jit(do_not_specialize=["num_pairs", "num_steps", "num_tiles"])
def _plan_tiles(
    chosen, tiles, num_pairs, num_steps, num_tiles, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    experts = tl.arange(0, EXPERTS)
    begins = tl.zeros([EXPERTS], tl.int32)
    ends = tl.zeros([EXPERTS], tl.int32)
    begins_most = begins + num_pairs
    ends_most = ends + num_pairs
    for _step in range(num_steps):  # binary searches for the first pair of each expert and the first one behind it
        middle = (begins + begins_most) // 2
        searches = begins < begins_most
        is_less = searches & (tl.load(chosen + middle, mask=searches, other=0) < experts)
        begins = tl.where(is_less, middle + 1, begins)
        begins_most = tl.where(searches & (is_less == 0), middle, begins_most)
        middle = (ends + ends_most) // 2
        searches = ends < ends_most
        is_less = searches & (tl.load(chosen + middle, mask=searches, other=0) <= experts)
        ends = tl.where(is_less, middle + 1, ends)
        ends_most = tl.where(searches & (is_less == 0), middle, ends_most)
    counts = tl.where(experts < num_experts, ends - begins, 0)
    needed = (counts + ROWS - 1) // ROWS
    last = tl.cumsum(needed, axis=0)
    numbers = tl.program_id(0) * TILES + tl.arange(0, TILES)
    is_of = (numbers[None, :] < last[:, None]) & (numbers[None, :] >= (last - needed)[:, None])
    expert = tl.sum(tl.where(is_of, experts[:, None], 0), axis=0)
    place = (numbers[None, :] - (last - needed)[:, None]) * ROWS
    first = tl.sum(tl.where(is_of, begins[:, None] + place, 0), axis=0)
    count = tl.sum(tl.where(is_of, tl.minimum(counts[:, None] - place, ROWS), 0), axis=0)
    inside = numbers < num_tiles
    tl.store(tiles + numbers * 3, expert, mask=inside)
    tl.store(tiles + numbers * 3 + 1, first, mask=inside)
    tl.store(tiles + numbers * 3 + 2, count, mask=inside)


@triton.jit(do_not_specialize=["per_row"])
def _multiply_experts(
    x, order, tiles, shares, bias, numbers, scales, starts, factors, out,
    size, all_outputs, columns, width, per_row,
    GROUP: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, STARTS: tl.constexpr, BYTES: tl.constexpr,
    HAS_SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    tile = tiles + tl.program_id(1) * 3
    count = tl.load(tile + 2)
    if count == 0:
        return
    rows = tl.arange(0, ROWS)
    are_rows = rows < count
    pairs = tl.load(order + tl.load(tile + 1) + rows, mask=are_rows, other=0)
    results = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    real = results < size
    outputs = tl.load(tile) * size + results
    each = tl.arange(0, BYTES)
    lines = numbers + outputs.to(tl.int64)[:, None] * width + each[None, :]
    inputs = x + (pairs // per_row)[None, :] * columns + each[:, None]
    sums = sum_products(
        lines, inputs, scales, starts, factors, outputs, real, are_rows, all_outputs, columns, 0, width // BYTES,
        GROUP, FACTOR, KIND, STARTS, BYTES, ROWS, OUTPUTS,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=real, other=0.0).to(tl.float32)[:, None]
    if HAS_SHARES:
        sums *= tl.load(shares + pairs, mask=are_rows, other=0.0).to(tl.float32)[None, :]
    places = pairs[None, :] * size + results[:, None]
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=real[:, None] & are_rows[None, :])


def plan_tiles(chosen: torch.Tensor, num_experts: int) -> Plan:
    """Return the tiles for chosen experts (tokens, experts of a token)."""
    num_pairs = chosen.numel()
    in_order, order = torch.sort(chosen.flatten(), stable=True)
    has_many = num_pairs > MANY * num_experts
    rows = _TILES[has_many][0]
    most_used = min(num_pairs, num_experts)
    num_tiles = most_used + (num_pairs - most_used) // rows
    tiles = torch.empty((num_tiles, 3), dtype=torch.int32, device=chosen.device)
    _plan_tiles[(triton.cdiv(num_tiles, _PLANNED),)](
        in_order, tiles, num_pairs, num_pairs.bit_length(), num_tiles, num_experts,
        ROWS=rows, EXPERTS=triton.next_power_of_2(num_experts), TILES=_PLANNED, num_warps=8,
    )  # fmt: skip
    return Plan(order, tiles, num_experts, has_many)


def multiply_experts(
    x: torch.Tensor,
    weights: Weights,
    plan: Plan,
    shares: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the products (pairs, out) of tokens (tokens, in), or of pairs (pairs, in), with their experts.

    weights: the matrices of all experts, one below the other. bias: (all outputs,). shares: (pairs,), by which the
    results are multiplied.
    """
    num_pairs, size = len(plan.order), weights.out_features // plan.num_experts
    x, shares = x.contiguous(), None if shares is None else shares.contiguous()
    assert x.shape[1] == weights.in_features
    tiles = _SMALLER_TILES if weights.starts is not None and capability() >= 120 else _TILES
    rows, outputs, num_warps = tiles[plan.has_many]
    out = x.new_empty((num_pairs, size))
    _multiply_experts[(triton.cdiv(size, outputs), len(plan.tiles))](
        x, plan.order, plan.tiles, shares, bias, *list_tensors(weights), out,
        size, weights.out_features, weights.in_features, weights.numbers.shape[1], num_pairs // len(x),
        **name_form(weights), HAS_SHARES=shares is not None, HAS_BIAS=bias is not None, ROWS=rows, OUTPUTS=outputs,
        num_warps=num_warps, num_stages=NUM_STAGES,
    )  # fmt: skip
    return out
