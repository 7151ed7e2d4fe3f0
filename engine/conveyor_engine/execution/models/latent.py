"""Keeps the latents of multi-head latent attention (MLA) in the KV cache, and not the keys and values of all heads.

`tasks.generate` and `preview` call `keep_latents` once, before they know the layers' shapes. transformers' attention of
this kind expands each token's latent with `kv_b_proj` to the keys and values of all heads, and then attends. Here both
halves of `kv_b_proj` move to other places (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): the half for keys to the
queries, and the half for values to the result of attention.

    query . (K latent) = (K^T query) . latent        sum of p * (V latent) = V (sum of p * latent)

So the cache holds one KV head: the latent and then the rotary key, of which the latent is also the value. All other
parts of the attention keep transformers' code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionSpec
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.attention.interface import Paged, PagedStep
from conveyor_engine.execution.attention.packed import Packed
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.latent_prompts import Division, Expander, PerHead, Sizes, divide_step
from conveyor_engine.execution.models.linear import LinearSpec, linear_kind
from conveyor_engine.execution.models.quantized.deferred import read_weights, stand_ins
from conveyor_engine.execution.models.trial import NUM_TOKENS, PART_SCALES, Call, observe_calls, same

EXPANDING = "kv_b_proj"
_EXPAND = "expand_kv"  # transformers' method that calls it
_NOPE = "qk_nope_head_dim"  # transformers' name for the size of the part of a query that has no position


class TorchHeads(nn.Module):
    """A `PerHead` in plain torch. weights: (H, out, in)."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.Parameter(weights, requires_grad=False)

    def run(self, x: torch.Tensor, y: torch.Tensor, first: int = 0) -> None:
        weights = self.weights[first : first + x.shape[1]]
        y.copy_(torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1))


class Latent(nn.Module):
    """The two halves of a `kv_b_proj`, in its place."""

    def __init__(self, expand: nn.Linear, nope: int, rotary: int, value_dim: int) -> None:
        """nope, value_dim: how many outputs of a head belong to its key, and to its value. rotary: the key's rest."""
        super().__init__()
        read_weights(expand)
        self._nope, self._value_dim, self._rank = nope, value_dim, expand.in_features
        weight = expand.weight.data.view(-1, nope + value_dim, self._rank)
        self.is_meta = weight.is_meta  # for sizes, without numbers to compare
        kind = linear_kind(LinearSpec(weight.device.type, weight.dtype))
        make: Callable[[torch.Tensor], PerHead] = native.PackedHeads if kind == "native" else TorchHeads
        self._of_keys = make(weight[:, :nope].transpose(1, 2).contiguous())
        self._of_values = make(weight[:, nope:].contiguous())
        self.expander: Expander | None = None
        if kind == "native":  # prompts need a copy in the order of the original
            sizes = Sizes(self._rank, nope, rotary, value_dim)
            self.expander = Expander(make(weight[:, :nope]), self._of_values, sizes)

    def keep(self, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one KV head: latent (1, 1, T, R), rotary (1, 1, T, P) -> key (1, 1, T, R + P), value (1, 1, T, R)."""
        key = torch.cat((latent, rotary), dim=-1)
        return key, key[..., : self._rank]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries for the latents: (T, H, nope + P) -> (T, H, R + P)."""
        absorbed = query.new_empty((*query.shape[:2], self._rank + query.shape[2] - self._nope))
        absorbed[..., self._rank :] = query[..., self._nope :]
        self._of_keys.run(query[..., : self._nope], absorbed[..., : self._rank])
        return absorbed

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Return each head's result from its sum of latents: (T, H, R) -> (T, H, Dv)."""
        out = attended.new_empty((*attended.shape[:2], self._value_dim))
        self._of_values.run(attended, out)
        return out


@dataclass(frozen=True, slots=True)
class _PagedLatent:
    """A `Paged` for the queries of all heads and the one KV head of `Latent.keep`."""

    paged: Paged
    latent: Latent

    @property
    def runs_bidirectional(self) -> bool:
        return self.paged.runs_bidirectional

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        spec = replace(spec, values_are_keys=True)
        paged, expander = self.paged, self.latent.expander
        if expander is not None and isinstance(paged, PagedStep) and isinstance(paged.backend, CpuNative):
            is_short = paged.last is not None and spec.layer == paged.last.layer
            division = (
                None if is_short else divide_step(paged.metadata, paged.backend.table(spec.layer), expander.sizes)
            )
            if division is not None:
                paged.backend.write_kv(spec.layer, key, value, paged.metadata)
                return self._attend_divided(expander, division, spec, query, paged.backend)
        return self.latent.expand(paged.attend(spec, self.latent.absorb(query), key, value))

    def _attend_divided(
        self, expander: Expander, division: Division, spec: AttentionSpec, query: torch.Tensor, backend: CpuNative
    ) -> torch.Tensor:
        """Attend where this step's latents are already in the cache."""
        out = query.new_zeros((*query.shape[:2], expander.sizes.value))
        for each in division.long:
            out[each.first : each.end] = expander.attend(spec, query[each.first : each.end], backend, each)
        if len(division.others):
            absorbed = self.latent.absorb(query[division.others])
            out[division.others] = self.latent.expand(backend.attend(spec, absorbed, division.step))
        return out


class LatentForward:
    """The forward of an attention module whose cache holds latents."""

    def __init__(self, forward: Callable[..., Any], latent: Latent) -> None:
        self._forward, self._latent = forward, latent

    def __call__(self, *arguments: Any, paged: Paged | None = None, **others: Any) -> Any:
        return self._forward(*arguments, paged=paged and _PagedLatent(paged, self._latent), **others)


@stand_ins()
def keep_latents(model: PreTrainedModel, widest: int | None = None) -> int:
    """Make the model's latent attention keep latents. Return in how many layers.

    A layer that does not compute the same afterwards stays as it is, and so does one with latents of more numbers than
    `widest`.
    """
    found = [module for module in model.modules() if _is_latent(module, widest)]
    calls = observe_calls(model) if found else {}
    with torch.inference_mode():
        return sum(_keep(attention, calls[attention]) for attention in found if attention in calls)


def prompt_bytes(model: nn.Module, context: int, dtype: torch.dtype) -> int:
    """Return the memory that attention over the latents of so many tokens needs beside that of its inputs."""
    expanders = [part.expander for part in model.modules() if isinstance(part, Latent)]
    return max((each.sizes.room_bytes(context, dtype.itemsize) for each in expanders if each is not None), default=0)


def _is_latent(module: nn.Module, widest: int | None) -> bool:
    expand = getattr(module, EXPANDING, None)
    if not hasattr(module, _EXPAND) or type(expand) is not nn.Linear or expand.bias is not None:
        return False
    return hasattr(module, _NOPE) and (widest is None or expand.in_features <= widest)


def _keep(attention: Any, call: Call) -> bool:
    expand, forward = attention.kv_b_proj, attention.forward
    attended = call.attended(attention)
    if attended is None or attended.spec != AttentionSpec(attended.spec.layer, attended.spec.scaling, None, None):
        return False  # with a window or sinks, which no published model of this kind has
    expected = _answers(attention, call)
    nope = attention.qk_nope_head_dim
    latent = Latent(expand, nope, attended.query.shape[2] - nope, attention.v_head_dim)
    attention.kv_b_proj, attention.expand_kv = latent, latent.keep
    attention.forward = LatentForward(forward, latent)
    try:
        if latent.is_meta or same(expected, _answers(attention, call)):
            return True
    except checks.TRANSFORMERS_ERRORS as error:
        checks.raise_if_of_device(error)
    del attention.forward, attention.expand_kv
    attention.kv_b_proj = expand
    return False


def _answers(attention: nn.Module, call: Call) -> tuple[object, ...]:
    return tuple(call.run(attention, scale, Packed([0, NUM_TOKENS])) for scale, _ in PART_SCALES)
