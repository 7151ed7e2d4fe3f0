"""Compares modules whose weights have few bits on a GPU with plain products. Called by `gpu_packing` at the start."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.execution.kernels.few_rows import Norm
from conveyor_engine.execution.kernels.weights import has_blocks, take_outputs, widen_to_bytes
from conveyor_engine.execution.models.experts import computes_same, find_clamps
from conveyor_engine.execution.models.gpu_experts import Clamps, GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.quantized.deferred import stand_ins
from conveyor_engine.execution.models.trial import random, same

_TRIED_ROWS = (1, 16, 32, 64, 257)  # for each kernel and each size of its tiles
_TRIED_OUTPUTS: Final = 4096  # bounds the memory of a trial
_EPS: Final = 1e-6
_PER_TOKEN: Final = 2  # experts
Restore = Callable[[int, int, torch.dtype], torch.Tensor]
"""Returns plain weights: from the first output and the number of outputs."""


def compare_linear(whole: GpuLinear, restore: Restore) -> str:
    """Return what differs from the plain products of some outputs; empty if nothing does."""
    count = min(whole.out_features, _TRIED_OUTPUTS)
    weight = restore(0, count, whole.dtype)
    bias = None if whole.bias is None else whole.bias.data[:count]
    packed = take_outputs(whole.packed, count)
    forms = [packed, widen_to_bytes(packed)] if has_blocks(packed) else [packed]  # the latter in joined layers
    found = (_find_difference(GpuLinear(each, bias, whole.dtype), weight) for each in forms)
    return next((differs for differs in found if differs), "")


def _find_difference(ours: GpuLinear, weight: torch.Tensor) -> str:
    differs = next((f"{rows} rows" for rows in _TRIED_ROWS if not _is_same(ours, weight, rows)), "")
    return differs or ("" if same(weight, ours.weight) else "its weights")


def _is_same(ours: GpuLinear, weight: torch.Tensor, rows: int) -> bool:
    x, residual = random(rows, ours.in_features, like=weight), random(rows, len(weight), like=weight, seed=1)
    product = functional.linear(x, weight, ours.bias)
    if not same(product, ours(x)) or not same(product + residual, ours.add_to(residual, x)):
        return False
    return rows > 1 or _fuses_same(ours, weight, x, residual)


def _fuses_same(ours: GpuLinear, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Compare products of one row that have a norm before them, and a residual or an activation after them."""
    norm = Norm(random(ours.in_features, like=weight, seed=2), _EPS, 1.0)
    normed = functional.rms_norm(x.float(), x.shape[1:], norm.offset + norm.weight.float(), norm.eps).to(x.dtype)
    product = functional.linear(normed, weight, ours.bias)
    if not same(product + residual, ours.multiply_row(x, norm=norm, residual=residual)):
        return False
    if len(weight) % 2:
        return True
    gate, up = product.chunk(2, dim=-1)
    return same(functional.silu(gate) * up, ours.multiply_row(x, norm=norm, gated=True))


def compare_experts(original: nn.Module, ours: GpuExperts, gate_up: Restore, down: Restore) -> str:
    """Return what differs from transformers' experts and from the plain products of some; empty if nothing does.

    The original is on the host, perhaps with deferred weights: random numbers show whether its formula is ours.
    """
    clamps, names = find_clamps(original), ("gate_up_proj", "down_proj")
    matrices = [original.get_parameter(name) for name in names]
    biases = [None if clamps is None else original.get_parameter(f"{name}_bias") for name in names]
    with stand_ins(keep=True):
        plain = [each if clamps is None else each.transpose(1, 2) for each in matrices]
        if not computes_same(original, PlainExperts(plain, biases, clamps), plain[1]):
            return "its formula"
    few = sorted({0, ours.num_experts // 2, ours.num_experts - 1})
    sizes = ours.gate_up.out_features // ours.num_experts, ours.down.out_features // ours.num_experts
    restored = [
        torch.stack([restore(expert * size, size, ours.dtype) for expert in few])
        for restore, size in zip((gate_up, down), sizes, strict=True)
    ]
    device = ours.down.numbers.device
    of_few = [None if each is None else each.view(ours.num_experts, -1)[few] for each in ours.biases]
    some = PlainExperts(restored, of_few, clamps)
    numbers = torch.tensor(few, device=device)
    for tokens in ours.list_variants(_PER_TOKEN):
        x = random(tokens, ours.gate_up.in_features, like=some.down)
        places = torch.arange(tokens * _PER_TOKEN, device=x.device).view(tokens, -1) % len(few)
        shares = random(tokens, _PER_TOKEN, like=x).abs()
        if not same(some(x, places, shares), ours(x, numbers[places], shares)):
            return f"{tokens} tokens"
    return ""


class PlainExperts:
    """Experts with torch's products."""

    def __init__(
        self, matrices: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], clamps: Clamps | None
    ) -> None:
        """matrices: gate and up (experts, 2 * inner, in), and down (experts, in, inner)."""
        self.gate_up, self.down = matrices
        self._biases, self._activate = biases, _silu_mul if clamps is None else clamps

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return what `Experts.forward` returns."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in sorted({*chosen.flatten().tolist()}):
            first, second = (None if each is None else each[expert] for each in self._biases)
            inner = self._activate(functional.linear(x, self.gate_up[expert], first))
            share = torch.where(chosen == expert, shares, 0).float().sum(dim=1, keepdim=True)
            out += share * functional.linear(inner, self.down[expert], second).float()
        return out.to(x.dtype)


def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
