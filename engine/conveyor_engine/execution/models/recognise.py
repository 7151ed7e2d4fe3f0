"""Recognises modules that one of our modules can replace, and builds ours from their parts and weights.

Called by `fuse`. The names of a module's parts decide which replacement to try, and `trial` checks that both compute
the same. A module with an unknown part, weight, hook or argument is not recognised. A module whose results differ on
random input is not replaced either, for example because of another order of norms, a scaled residual or another
rotation. A module that passes both checks is replaced.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from conveyor_engine.execution import kernels
from conveyor_engine.execution.attention.backend import LayerShape
from conveyor_engine.execution.models.elementwise import choose_elementwise
from conveyor_engine.execution.models.layers import Attention, DecoderLayer, GatedMlp, LayerNorms, RmsNorm
from conveyor_engine.execution.models.linear import Linear, Plain, build_linear, stackable
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer, find_parts
from conveyor_engine.execution.models.trial import LAYER_SCALES, PART_SCALES, Calls, random, same

_QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_GATE_UP = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATIONS = {"act_fn", "activation_fn"}
_NORMS = {"input_layernorm", "post_attention_layernorm"}  # before attention and before the MLP
# In a layer that has these norms too, `post_attention_layernorm` comes after attention and not before the MLP.
_MORE_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


def layer_of(layer: nn.Module, calls: Calls) -> DecoderLayer | None:
    """Return our layer for a decoder layer with attention and gated MLP, each after a norm and added to the residual.

    Returns None if the layer is not such a layer.
    """
    parts = _parts(layer)
    norms = _layer_norms(parts)
    if norms is None or layer not in calls:
        return None
    attention, mlp = attention_of(parts["self_attn"], calls), mlp_of(parts["mlp"])
    if attention is None or mlp is None:
        return None
    ours = _build_layer(norms, attention, mlp)
    return ours if calls[layer].same(layer, ours, LAYER_SCALES) else None


def attention_of(attention: nn.Module, calls: Calls) -> Attention | None:
    """Return our module for attention with queries and keys rotated in halves, with or without a norm for each head.

    Returns None if the module is not such an attention.
    """
    parts = _parts(attention)
    qkv, out = _linears(parts, *_QKV), _linears(parts, ("o_proj",))
    norms = [parts[name] for name in ("q_norm", "k_norm") if name in parts]
    if qkv is None or out is None or len(parts) != len(qkv) + 1 + len(norms) or len(norms) == 1:
        return None
    attended = calls[attention].attended(attention) if attention in calls else None
    if attended is None or sum(linear.out_features for linear in qkv) != _qkv_features(attended.shape):
        return None
    weight = out[0].weight
    head_norms = (norm_of(norms[0]) or norms[0], norm_of(norms[1]) or norms[1]) if norms else None
    ours = attention_class(weight.device, head_norms or ())(
        attended.spec,
        attended.shape,
        (build_linear(qkv), build_linear(out)),
        head_norms,
        choose_elementwise(weight.device, weight.dtype).rope,
    )
    return ours if calls[attention].same(attention, ours, PART_SCALES) else None


def mlp_of(mlp: nn.Module) -> GatedMlp | None:
    """Return our module for an MLP with a gate; None if the module is not one."""
    parts = _parts(mlp)
    activation = next((getattr(mlp, name) for name in _ACTIVATIONS if hasattr(mlp, name)), None)
    gate_up, down = _linears(parts, *_GATE_UP), _linears(parts, ("down_proj",))
    if gate_up is None or down is None or activation is None or len(parts.keys() - _ACTIVATIONS) != len(gate_up) + 1:
        return None
    if sum(linear.out_features for linear in gate_up) != 2 * down[0].in_features:
        return None
    ours = GatedMlp(build_linear(gate_up), build_linear(down), _gated(activation, down[0].weight))
    x = random(3, gate_up[0].in_features, like=down[0].weight)
    return ours if all(same(mlp(x * scale), ours(x * scale)) for scale, _ in PART_SCALES) else None


def norm_of(norm: nn.Module) -> RmsNorm | None:
    """Return our module for an RMSNorm, with or without 1 added to the weight; None if the module is not one."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not type(norm).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or len(list(norm.parameters())) > 1:
        return None
    # With inputs of about sqrt(eps), eps is half of `mean(x * x) + eps`, so a wrong eps changes the result.
    inputs = [random(3, weight.shape[0], like=weight) * scale for scale in (1.0, eps**0.5)]
    for offset in (0.0, 1.0):
        ours = RmsNorm(weight.data.contiguous(), eps, offset)
        if all(same(norm(x), ours(x)) for x in inputs):
            return ours
    return None


def linear_of(linear: nn.Module) -> Linear | None:
    """Return our module for a linear layer; None if it is not one, or if torch's own kernel is used for it."""
    if type(linear) is not nn.Linear:
        return None
    ours = build_linear([linear])
    return None if ours is linear else ours


def attention_class(device: torch.device, norms: Sequence[nn.Module]) -> type[Attention]:
    """Return the class of attention for heads with these norms."""
    kinds = {(norm.eps, norm.offset) if isinstance(norm, RmsNorm) else None for norm in norms}
    if kernels.why_missing(device) is not None or None in kinds or len(kinds) > 1:
        return Attention
    from conveyor_engine.execution.models.triton_layers import TritonAttention  # needs triton

    return TritonAttention


def _build_layer(norms: LayerNorms, attention: Attention, mlp: GatedMlp) -> DecoderLayer:
    parts = find_parts(norms, attention, mlp)
    if parts is not None:
        return NativeDecoderLayer(norms, attention, mlp, parts)
    return layer_class(mlp.down_proj.weight.device, norms)(norms, attention, mlp)


def layer_class(device: torch.device, norms: LayerNorms) -> type[DecoderLayer]:
    """Return the class of decoder layer for these norms."""
    if kernels.why_missing(device) is not None or not isinstance(norms.before_mlp, RmsNorm):
        return DecoderLayer
    from conveyor_engine.execution.models.triton_layers import TritonDecoderLayer  # needs triton

    return TritonDecoderLayer


def is_hooked(module: nn.Module) -> bool:
    """Return whether the module or one of its parts has a hook, which a replacement would not call."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module's parts except dropout, which has no effect here; empty if the module itself has weights."""
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        return {}
    return {name: part for name, part in module.named_children() if not isinstance(part, nn.Dropout)}


def _layer_norms(parts: dict[str, nn.Module]) -> LayerNorms | None:
    """Return the norms of a decoder layer with these parts; None if it has other parts or norms."""
    norms = {name: norm_of(part) or part for name, part in parts.items() if name.endswith("layernorm")}
    if parts.keys() - norms.keys() != {"self_attn", "mlp"} or not norms.keys() >= _NORMS:
        return None
    first, second = norms["input_layernorm"], norms["post_attention_layernorm"]
    if norms.keys() == _NORMS:
        return LayerNorms(first, second)
    if norms.keys() != _NORMS | _MORE_NORMS:
        return None
    return LayerNorms(first, norms["pre_feedforward_layernorm"], (second, norms["post_feedforward_layernorm"]))


def _qkv_features(shape: LayerShape) -> int:
    return (shape.num_heads + shape.num_kv_heads) * shape.head_dim + shape.num_kv_heads * shape.value_dim


def _linears(parts: dict[str, nn.Module], *choices: tuple[str, ...]) -> list[Plain] | None:
    """Return the linear layers that the first matching choice names. A choice matches if the module has all of them.

    Returns None if one product cannot compute these layers, or if no choice matches.
    """
    for names in choices:
        found = [part for name in names if isinstance(part := parts.get(name), Plain)]
        if len(found) == len(names):
            return found if stackable(found) else None
    return None


def _gated(activation: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> Callable[..., torch.Tensor]:
    x = random(3, 64, like=like)
    if same(functional.silu(x), activation(x)):
        return choose_elementwise(like.device, like.dtype).silu_mul
    return partial(_activate_and_multiply, activation)


def _activate_and_multiply(activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
