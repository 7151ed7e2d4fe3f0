"""Attention over the sequences of one step, without cache or padding. For models that embed.

Used by `packed_native` where its own cannot run, and by `models.packing`. Plain torch, so it runs on every device. Each
sequence is attended by itself, so its numbers do not depend on the rest of the batch.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch.nn import functional

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention.backend import AttentionSpec
from conveyor_engine.execution.attention.torch_paged import attend_one


@dataclass(frozen=True, slots=True)
class Packed:
    """`Paged` for whole sequences that lie one after another."""

    starts: list[int]  # of each sequence, and where the last one ends
    runs_bidirectional: ClassVar[bool] = True

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        check_spec(spec)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        for begin, end in pairwise(self.starts):
            out[begin:end] = _attend_whole(query[begin:end], key[begin:end], value[begin:end], spec)
        return out


def check_spec(spec: AttentionSpec) -> None:
    """Raises ModelError for attention that neither way computes."""
    if not spec.causal and (spec.sliding_window or spec.softcap is not None):
        raise ModelError("a layer that is not causal has a sliding window or a soft cap, which this engine lacks")


def _attend_whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """query (n, H, D), key (n, Hkv, D), value (n, Hkv, Dv) of one sequence -> (n, H, Dv)."""
    if spec.sliding_window or spec.softcap is not None:
        return attend_one(query, key, value, spec)
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, scale=spec.scaling)
    return out[0].transpose(0, 1)
