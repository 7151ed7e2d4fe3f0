"""Counts the bytes of a GGUF file's weights in an engine, from the file's header. Called by `describe`."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Final

from conveyor_engine.execution.models.quantized.gguf_blocks import (
    GPU_BITS,
    JOINED_BITS,
    JOINED_GPU_BITS,
    K_TYPES,
    KEPT_BITS,
)
from conveyor_engine.gguf.files import SUFFIX
from conveyor_engine.gguf.header import TensorPlace, read_header

_PLAIN_BITS: Final = 16
_EMBEDDINGS, _HEAD = "token_embd.weight", "output.weight"
_PLAIN: Final = re.compile(r".*\.(ffn_gate_inp|ssm_conv1d|shortconv\.conv)\.")  # routers and convolutions
_JOINED: Final = re.compile(r"(?<=\.)(attn_[qkv]|ffn_(?:gate|up)(?:_exps|_shexp)?)(?=\.weight$)")


def count_gguf_bytes(directory: Path, *, keeps_experts: bool, on_gpu: bool = False) -> int | None:
    """Return the bytes of the weights; None if most of them are restored to 16 bits.

    keeps_experts: whether the kernels compute the model's experts. On a GPU, embeddings have 16 bits.
    """
    header = read_header(sorted(directory.glob(f"*{SUFFIX}")))
    tensors = dict(header.tensors)
    plain_table = on_gpu or header.architecture.startswith("gemma")  # which scales its rows
    if _HEAD not in tensors:  # tied, so the kernels have one table, in the head's bits
        tensors[_HEAD] = tensors[_EMBEDDINGS] if plain_table else tensors.pop(_EMBEDDINGS)
    joined, num_bits, num_weights, num_kept = _find_joined(tensors), 0.0, 0, 0
    for name, place in tensors.items():
        is_table = name == _EMBEDDINGS
        is_plain = len(place.shape) == 1 or _PLAIN.match(name) or ("_exps" in name and not keeps_experts)
        is_plain = is_plain or (is_table and plain_table)
        kinds = joined[_JOINED.sub(_name_joined, name)]
        if on_gpu and "_exps" not in name and kinds - K_TYPES:
            kinds = {place.kind.name}  # such layers are not joined
        bits = _PLAIN_BITS if is_plain else _find_bits(kinds, on_gpu)
        count = math.prod(place.shape)
        num_bits += count * bits
        num_weights += 0 if is_table else count
        num_kept += count if bits < _PLAIN_BITS and not is_table else 0
    return round(num_bits / 8) if 2 * num_kept >= num_weights else None


def _find_bits(kinds: Set[str], on_gpu: bool) -> float:
    """Return the bits of a number of a layer that has numbers of these types."""
    known, joined = (GPU_BITS, JOINED_GPU_BITS) if on_gpu else (KEPT_BITS, JOINED_BITS)
    if kinds - known.keys() or (on_gpu and len(kinds) > 1 and kinds - K_TYPES):
        return _PLAIN_BITS
    return joined if len(kinds) > 1 else known[min(kinds)]


def _find_joined(tensors: Mapping[str, TensorPlace]) -> dict[str, set[str]]:
    """Return the number types of the layers that our layers join, by a name for all of them."""
    kinds: defaultdict[str, set[str]] = defaultdict(set)
    for name, place in tensors.items():
        kinds[_JOINED.sub(_name_joined, name)].add(place.kind.name)
    return kinds


def _name_joined(match: re.Match[str]) -> str:
    if match[0].startswith("attn"):
        return "attn_qkv"
    return re.sub("gate|up", "gate_up", match[0])
