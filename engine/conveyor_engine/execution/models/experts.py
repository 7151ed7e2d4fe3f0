"""Experts that the compiled kernels compute. `fuse` replaces transformers' by these, after a trial on random input.

All families whose experts are gated MLPs in two tensors share this module. Their routers keep transformers' code.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.execution.models.linear import LinearSpec, linear_kind
from conveyor_engine.execution.models.quantized.rounding import Grid
from conveyor_engine.execution.models.trial import random, same
from conveyor_engine.execution.native.experts import PackedExperts

_WEIGHTS = {"gate_up_proj", "down_proj"}
Grids = tuple[Sequence[Grid] | None, Sequence[Grid] | None]
_SCALES = (1.0, 30.0)  # of the input; large numbers reveal clipping


class Experts(nn.Module):
    """Experts over packed tokens: hidden states (T, H), and the numbers and shares of each token's experts (T, k)."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, grids: Grids = (None, None)) -> None:
        """grids: of the checkpoint's whole numbers in both, which `quantize` keeps."""
        super().__init__()
        self.packed = PackedExperts(gate_up, down)
        self.grids = grids

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.packed.run(hidden_states, top_k_index, top_k_weights)


def is_gated(experts: nn.Module) -> bool:
    """Return whether these are experts with a gate and SiLU in two tensors, which may be on the device `meta`."""
    weights = dict(experts.named_parameters(recurse=False))
    if weights.keys() != _WEIGHTS or any(True for _ in experts.buffers()):
        return False
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    act, probe = getattr(experts, "act_fn", None), random(3, 64, like=torch.empty(0))
    return (
        gate_up.dim() == down.dim() == 3
        and gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
        and callable(act)
        and same(functional.silu(probe), act(probe))
    )


def experts_of(experts: nn.Module) -> Experts | None:
    """Return our module for experts with a gate and SiLU; None if the module is not such experts.

    Also returns None if the compiled kernels do not compute linear layers of this type here.
    """
    if not is_gated(experts):
        return None
    gate_up, down = (experts.get_parameter(name).data for name in ("gate_up_proj", "down_proj"))
    if linear_kind(LinearSpec(down.device.type, down.dtype)) != "native":
        return None
    ours = Experts(gate_up, down, getattr(experts, "grids", (None, None)))
    return ours if all(_computes_same(experts, ours, down, scale) for scale in _SCALES) else None


def _computes_same(original: nn.Module, ours: Experts, down: torch.Tensor, scale: float) -> bool:
    """Compare on five tokens, of which each has up to four experts."""
    per_token = min(4, len(down))
    chosen = (7 * torch.arange(5)[:, None] + torch.arange(per_token)) % len(down)
    shares = random(5, per_token, like=down).abs()
    x = random(5, down.shape[1], like=down) * scale
    return same(original(x, chosen, shares), ours(x, chosen, shares))
