"""Restores the weights of GGUF files, under the names and in the order that transformers' classes have.

llama.cpp renames tensors, and for some architectures it stores other numbers: keys and queries with their rotary halves
interleaved, norms plus one, experts stacked. Each architecture has a list of transformers' own conversions, which undo
that. transformers has three of these lists. Called by `checkpoint`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig

from conveyor_engine.execution.models.quantized.gguf_blocks import read_blocks, read_bytes
from conveyor_engine.execution.models.quantized.numbers import read_exponents, read_fp4
from conveyor_engine.execution.models.quantized.reading import Leaf, Weight
from conveyor_engine.gguf.files import SUFFIX
from conveyor_engine.gguf.header import KINDS, TensorPlace, read_header

Mapped = list[Any]  # transformers' conversions
_FLOAT_TYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPE_IDS: Final = {kind.name: number for number, kind in KINDS.items()}
_OF_POSITIONS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # in config.json


def plan_gguf(directory: Path, config: PretrainedConfig) -> Iterator[tuple[str, Weight]]:
    """Yield each weight with its name in transformers. Raises ModelError."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    header = read_header(sorted(directory.glob(f"*{SUFFIX}")))
    mapping = _build_mapping(header.architecture, config.get_text_config())
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    sources: dict[str, dict[str, TensorPlace]] = {}
    names: dict[str, str] = {}  # in the file
    for stored, place in header.tensors.items():
        if stored not in _OF_POSITIONS:
            name, pattern = rename_source_key(stored, renamings, converters)
            sources.setdefault(name, {})[pattern or ""] = place
            names[name] = stored
    for name, places in sources.items():
        converter = by_pattern.get(next(iter(places)))
        leaves = {pattern: _make_leaf(names[name], place) for pattern, place in places.items()}
        yield name, Weight(leaves, partial(_convert, name, converter))


def _make_leaf(name: str, place: TensorPlace) -> Leaf:
    return Leaf(
        name, lambda: place.shape, partial(dequantize, place), lambda keeps_floats, _: read_blocks(place, keeps_floats)
    )


def _convert(name: str, converter: Any, values: Mapping[str, Tensor]) -> Tensor:
    for operation in converter.operations if converter else ():
        values = operation.convert(dict(values), source_patterns=converter.source_patterns, target_patterns=[name])
    (weight,) = values.values()
    return weight


def dequantize(place: TensorPlace) -> Tensor:
    """Return the numbers of a stored tensor in float32."""
    stored, name = read_bytes(place), place.kind.name
    if name in _FLOAT_TYPES:
        return stored.view(_FLOAT_TYPES[name]).to(torch.float32).reshape(place.shape)
    if name in ("Q5_0", "Q5_1"):
        return _dequantize_q5(stored.view(-1, place.kind.num_bytes), has_least=name == "Q5_1").reshape(place.shape)
    if name == "MXFP4":
        return _dequantize_mxfp4(stored.view(-1, place.kind.num_bytes)).reshape(place.shape)
    from transformers.integrations.gguf.dequant import dequantize as of_transformers

    numbers: Tensor = of_transformers(stored, _TYPE_IDS[name])
    return numbers.reshape(place.shape)


def _dequantize_q5(blocks: Tensor, *, has_least: bool) -> Tensor:
    """ggml's Q5_0 and Q5_1, which transformers lacks: 32 numbers of 4 bits, and the fifth bits of all in 4 bytes."""
    begin = 4 if has_least else 2
    scale = blocks[:, :2].view(torch.float16).to(torch.float32)
    fifth = (blocks[:, begin : begin + 4, None] >> torch.arange(8, dtype=torch.uint8)).reshape(-1, 32) & 1
    low = blocks[:, begin + 4 :]
    numbers = (torch.cat((low & 15, low >> 4), dim=1) | (fifth << 4)).to(torch.float32)
    if not has_least:
        return scale * (numbers - 16)
    return scale * numbers + blocks[:, 2:4].view(torch.float16).to(torch.float32)


def _dequantize_mxfp4(blocks: Tensor) -> Tensor:
    """ggml's MXFP4: an exponent, and 32 numbers of 4 bits, of which the first 16 are the low halves of the bytes."""
    in_pairs = read_fp4(blocks[:, 1:]).view(-1, 16, 2)
    return read_exponents(blocks[:, :1]) * in_pairs.transpose(-2, -1).flatten(-2)


def _build_mapping(architecture: str, config: Any) -> Mapped:
    """Return the conversions of an architecture. config.json has been built, so it is a known one."""
    from transformers.integrations.gguf import GGUF_ARCHS

    build = _OURS.get(architecture) or GGUF_ARCHS[architecture]
    mapping: Mapped = build(config)
    return mapping


def _rename(**names: str) -> Mapped:
    """Return renamings of the tensors of a layer, or of the last norm."""
    from transformers.core_model_loading import WeightRenaming

    return [WeightRenaming(rf"(^|\.){stored}\.", rf"\1{name}.") for stored, name in names.items()]


def _decoder(**names: str) -> Mapped:
    from transformers.integrations.gguf.gguf_conversion_mapping import DENSE_DECODER_RENAMINGS

    return [*_rename(output_norm="model.norm", **names), *DENSE_DECODER_RENAMINGS]


_NORMS: Final = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS: Final = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _llama(config: Any) -> Mapped:
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf.gguf_conversion_mapping import PermuteRows

    converters = []
    for name, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
        order = torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2).transpose(1, 2).flatten()
        for end in ("weight", "bias"):
            pattern = f"self_attn.{name}.{end}"
            converters.append(WeightConverter(pattern, pattern, operations=[PermuteRows(order)]))
    return [*_decoder(**_NORMS), *converters]


def _qwen2(config: Any) -> Mapped:
    return _decoder(**_NORMS)


def _qwen3(config: Any) -> Mapped:
    return _decoder(**_NORMS, **_HEAD_NORMS)


def _qwen3_moe(config: Any) -> Mapped:
    from transformers.core_model_loading import WeightConverter, WeightRenaming
    from transformers.integrations.gguf.gguf_conversion_mapping import ConcatenateRows

    experts = WeightConverter(
        [r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
        ".mlp.experts.gate_up_proj",
        operations=[ConcatenateRows(dim=1)],
    )
    down = WeightRenaming(r"\.ffn_down_exps\.weight", ".mlp.experts.down_proj")
    return [*_qwen3(config), *_rename(ffn_gate_inp="mlp.gate"), experts, down]


def _gemma(config: Any) -> Mapped:
    from transformers.core_model_loading import WeightConverter
    from transformers.integrations.gguf.gguf_conversion_mapping import SubtractOne

    names = _GEMMA_NORMS | _HEAD_NORMS
    patterns = [rf"{name}\.weight" for name in (*names.values(), "model.norm")]
    minus = [WeightConverter(each, each.replace("\\", ""), operations=[SubtractOne()]) for each in patterns]
    return [*_decoder(**names), *minus]


def _gemma4(config: Any) -> Mapped:
    """Its norms are stored as they are."""
    from transformers.core_model_loading import WeightRenaming

    per_layer = {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
    of_experts = {f"post_ffw_norm_{number}": f"post_feedforward_layernorm_{number}" for number in (1, 2)}
    whole = {
        r"\.layer_output_scale\.weight": ".layer_scalar",
        r"\.ffn_gate_inp\.scale": ".router.scale",
        r"\.ffn_gate_inp\.weight": ".router.proj.weight",
        r"\.ffn_down_exps\.scale": ".router.per_expert_scale",
        r"\.ffn_down_exps\.weight": ".experts.down_proj",
        r"\.ffn_gate_up_exps\.weight": ".experts.gate_up_proj",
    }
    names = _GEMMA_NORMS | _HEAD_NORMS | per_layer | of_experts | {"pre_ffw_norm_2": "pre_feedforward_layernorm_2"}
    return [*_decoder(**names), *(WeightRenaming(stored, name) for stored, name in whole.items())]


def _phi3(config: Any) -> Mapped:
    joined = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    return _decoder(**_NORMS, **joined)


class _Interleave:
    """Joins the rows of gate and up, (experts, rows, ...), in turns. One of transformers' conversions in form."""

    def convert(
        self, values: dict[str, Tensor], source_patterns: list[str], target_patterns: list[str]
    ) -> dict[str, Tensor]:
        joined = torch.cat([values[pattern] for pattern in source_patterns], dim=1)
        order = torch.arange(joined.shape[1]).view(len(source_patterns), -1).t().flatten()
        return {target_patterns[0]: joined[:, order]}


def _gpt_oss(config: Any) -> Mapped:
    from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

    names = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    gate_up, down = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
    weights, biases = ([rf"\.ffn_{part}_exps\.{end}" for part in ("gate", "up", "down")] for end in ("weight", "bias"))
    return [
        *_decoder(**names),
        *_rename(ffn_gate_inp="mlp.router"),
        WeightRenaming(r"\.attn_sinks\.weight", ".self_attn.sinks"),
        WeightRenaming(biases[2], f"{down}_bias"),
        WeightConverter(weights[2], down, operations=[Transpose(1, 2)]),
        WeightConverter(weights[:2], gate_up, operations=[_Interleave(), Transpose(1, 2)]),
        WeightConverter(biases[:2], f"{gate_up}_bias", operations=[_Interleave()]),
    ]


_OURS: Final[Mapping[str, Callable[[Any], Mapped]]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granite": _llama,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
}
