"""Makes a loaded transformers model faster on a CPU, in place; what it computes stays the same.

Called by `model_runner` once, after loading. The model's own classes keep the say: this replaces single modules inside
them, each only if it gives the same results as the original on random input (but for rounding), so a class that looks
alike and computes something else keeps its own code.
- `q_proj`, `k_proj`, `v_proj` become one product, and so do `gate_proj` and `up_proj` (with SiLU in one pass);
- every other `nn.Linear` gets its weights in the order its kernel reads them, and loses the plain copy;
- RMSNorm, and the rotary embedding in an attention's forward, become one pass each.
"""

import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution import native
from conveyor_engine.execution.models.packed_linear import PackedLinear, linear_kind

_ROPE = "apply_rotary_pos_emb"  # the name it has in every model's module
# Largest difference next to the largest value. Roundings differ, in number and in order; formulas differ by far more.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def fuse_model(model: PreTrainedModel) -> dict[str, int]:
    """Replaces what it can; returns how many of each kind, for the log."""
    done: Counter[str] = Counter()
    with torch.inference_mode():
        if native.why_missing() is None:
            for parent in list(model.modules()):
                done["norms"] += _fuse_norms(parent)
                done["ropes"] += _fuse_rope(parent)
                done["mlps"] += _fuse_gate_up(parent)
        for parent in list(model.modules()):
            done["qkvs"] += _fuse_qkv(parent)
            done["linears"] += _pack_linears(parent)
    return dict(done)


class NativeRmsNorm(nn.Module):
    """x / rms(x) * (offset + weight)."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.offset = eps, offset

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return native.rms_norm(hidden_states, self.weight, self.eps, self.offset)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear([gate, up])
        self.down_proj = PackedLinear([down])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(native.silu_mul(self.gate_up_proj(x)))
        return out


class _Shared:
    """One product for several projections of the same input. Holds the result until each has had its part."""

    def __init__(self, projections: list[nn.Linear]) -> None:
        self._linear = PackedLinear(projections)
        self._sizes = [projection.out_features for projection in projections]
        self._input: torch.Tensor | None = None
        self._parts: list[torch.Tensor | None] = []

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Projection `index` of x (..., in): a slice of the merged result, not contiguous."""
        if self._input is not x or self._parts[index] is None:
            self._input, self._parts = x, list(self._linear(x).split(self._sizes, dim=-1))
        result, self._parts[index] = self._parts[index], None
        if all(part is None for part in self._parts):
            self._input = None
        assert result is not None
        return result


class MergedProjection(nn.Module):
    """Stands where one of the merged `nn.Linear` modules was."""

    def __init__(self, shared: _Shared, index: int) -> None:
        super().__init__()
        self._shared, self._index = shared, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.part(self._index, x)


def _fuse_norms(parent: nn.Module) -> int:
    count = 0
    for name, norm in list(parent.named_children()):
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight = getattr(norm, "weight", None)
        if not type(norm).__name__.endswith("RMSNorm") or not isinstance(eps, float):
            continue
        if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not native.supports(weight.dtype):
            continue
        if len(list(norm.parameters())) > 1:
            continue
        candidates = (NativeRmsNorm(weight.data.contiguous(), eps, offset) for offset in (0.0, 1.0))
        # At the size of sqrt(eps), eps is half of the sum.
        inputs = [_random(3, weight.shape[0], like=weight) * scale for scale in (1.0, eps**0.5)]
        for candidate in candidates:
            if all(_same(norm(x), candidate(x)) for x in inputs):
                setattr(parent, name, candidate)
                count += 1
                break
    return count


def _fuse_gate_up(parent: nn.Module) -> int:
    count = 0
    for name, mlp in list(parent.named_children()):
        linears = _linears(mlp, "gate_proj", "up_proj", "down_proj")
        activation = getattr(mlp, "act_fn", None)
        if linears is None or not callable(activation) or not _stackable(linears[:2]):
            continue
        x = _random(3, linears[0].in_features, like=linears[0].weight)
        if not _same(activation(x), nn.functional.silu(x)):
            continue
        fused = GatedMlp(*linears)
        if _same(mlp(x), fused(x)):
            setattr(parent, name, fused)
            count += 1
    return count


def _fuse_qkv(attention: nn.Module) -> int:
    names = ("q_proj", "k_proj", "v_proj")
    projections = _linears(attention, *names)
    if projections is None or not _stackable(projections):
        return 0
    shared = _Shared(projections)
    for index, name in enumerate(names):
        setattr(attention, name, MergedProjection(shared, index))
    return 1


def _pack_linears(parent: nn.Module) -> int:
    names = [name for name, _ in parent.named_children() if _linears(parent, name)]
    for name in names:
        setattr(parent, name, PackedLinear([getattr(parent, name)]))
    return len(names)


def _linears(parent: nn.Module, *names: str) -> list[nn.Linear] | None:
    """These children, if all are plain linear layers of a type that can be packed."""
    found = []
    for name in names:
        module = getattr(parent, name, None)
        if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
            return None
        if linear_kind(module.weight.dtype) is None:
            return None
        found.append(module)
    return found


def _stackable(linears: list[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}) == 1


def _fuse_rope(attention: nn.Module) -> int:
    """Gives this module a forward that is its class's own, but for the function it calls to rotate queries and keys."""
    forward = type(attention).forward
    if not isinstance(forward, types.FunctionType) or _ROPE not in forward.__code__.co_names:
        return 0
    original = forward.__globals__.get(_ROPE)
    if original is None or not _rotates_halves(original):
        return 0
    names = {**forward.__globals__, _ROPE: _native_rope(original)}
    rebuilt = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebuilt.__kwdefaults__ = forward.__kwdefaults__
    attention.forward = types.MethodType(rebuilt, attention)
    return 1


def _native_rope(original: Callable[..., Any]) -> Callable[..., Any]:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if args or kwargs or any(not _fits_rope(x, cos, sin) for x in (q, k)):
            return original(q, k, cos, sin, *args, **kwargs)
        return native.rope(q, cos, sin), native.rope(k, cos, sin)

    return rotate


def _fits_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        x.dim() == 4
        and x.shape[0] == 1
        and x.stride(3) == 1
        and cos.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[:2] == (1, x.shape[2])
        and x.dtype == cos.dtype == sin.dtype
        and native.supports(x.dtype)
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def _rotates_halves(function: Callable[..., Any]) -> bool:
    """Whether the function is what `native.rope` computes (others pair neighbours, or rotate a part)."""
    q, k, cos, sin = (
        _random(*shape, like=torch.empty(0)) for shape in ((1, 3, 5, 8), (1, 1, 5, 8), (1, 5, 8), (1, 5, 8))
    )
    try:
        expected = function(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError, IndexError):  # made for other shapes
        return False
    return all(map(_same, expected, (native.rope(q, cos, sin), native.rope(k, cos, sin))))


def _random(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.dtype)


def _same(expected: object, actual: torch.Tensor) -> bool:
    if not isinstance(expected, torch.Tensor) or expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    difference = (expected.float() - actual.float()).abs().max()
    return bool(difference <= _TOLERANCE[actual.dtype] * expected.float().abs().max())
