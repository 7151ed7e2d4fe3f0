"""Experts that the compiled kernels compute. `fuse` replaces transformers' by these, after a trial on random input.

`gpu_experts` has those for GPUs.

All families whose experts are gated MLPs in two tensors share this module. Their routers keep transformers' code.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.execution.models.gpu_experts import Clamps
from conveyor_engine.execution.models.linear import LinearSpec, linear_kind
from conveyor_engine.execution.models.quantized.deferred import Deferred
from conveyor_engine.execution.models.quantized.rounding import pack_grids
from conveyor_engine.execution.models.trial import random, same
from conveyor_engine.execution.native.experts import PackedExperts, PackedStack

_WEIGHTS = {"gate_up_proj", "down_proj"}
_SCALES = (1.0, 30.0)  # of the input; large numbers reveal clipping


class Experts(nn.Module):
    """Experts over packed tokens: hidden states (T, H), and the numbers and shares of each token's experts (T, k)."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """If a tensor is deferred, call `read_stored` before the experts compute answers."""
        super().__init__()
        both = {"gate_up": gate_up, "down": down}
        self._stored = {name: each for name, each in both.items() if isinstance(each, Deferred)}
        self.packed = PackedExperts(*(each.now() if isinstance(each, Deferred) else each for each in (gate_up, down)))

    def read_stored(self) -> bool:
        """Pack deferred weights: as whole numbers if the checkpoint has these. Return whether they were deferred."""
        stored, self._stored = self._stored, {}
        for name, each in stored.items():
            setattr(self.packed, name, None)
            setattr(self.packed, name, _pack_stored(each))
        return bool(stored)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.packed.run(hidden_states, top_k_index, top_k_weights)


def _pack_stored(weights: Deferred) -> PackedStack:
    grid = weights.find_grid(keeps_floats=False)
    packed = None if grid is None else pack_grids(grid, weights.shape[2], len(weights))
    return packed or PackedStack.pack(weights.read())


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


def find_clamps(experts: nn.Module) -> Clamps | None:
    """Return the activation of experts as gpt-oss has them: with biases, and matrices (experts, in, out)."""
    weights = dict(experts.named_parameters(recurse=False))
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if weights.keys() != _WEIGHTS | {f"{name}_bias" for name in _WEIGHTS}:
        return None
    gate_up, down = weights["gate_up_proj"], weights["down_proj"]
    if gate_up.dim() != 3 or gate_up.shape != (len(down), down.shape[2], 2 * down.shape[1]):
        return None
    return Clamps(alpha, limit) if isinstance(alpha, float) and isinstance(limit, float) else None


def experts_of(experts: nn.Module) -> Experts | None:
    """Return our module for experts with a gate and SiLU; None if the module is not such experts.

    Also returns None if the compiled kernels do not compute linear layers of this type here.
    """
    if not is_gated(experts):
        return None
    gate_up, down = (experts.get_parameter(name) for name in ("gate_up_proj", "down_proj"))
    if linear_kind(LinearSpec(down.device.type, down.dtype)) != "native":
        return None
    ours = Experts(gate_up, down)
    return ours if computes_same(experts, ours, down) else None


def computes_same(original: nn.Module, ours: Callable[..., torch.Tensor], down: torch.Tensor) -> bool:
    """Compare experts on a CPU, on five tokens, of which each has up to four experts."""
    per_token = min(4, len(down))
    chosen = (7 * torch.arange(5)[:, None] + torch.arange(per_token)) % len(down)
    shares = random(5, per_token, like=down).abs()
    inputs = [random(5, down.shape[1], like=down) * scale for scale in _SCALES]
    return all(same(original(x, chosen, shares), ours(x, chosen, shares)) for x in inputs)
