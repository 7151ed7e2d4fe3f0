"""Checkpoints like those of reports to vLLM, llm-compressor and AutoRound: mixed formats, and further tensors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine.execution.models.test_expert_grids import keep, to_awq, to_gptq, to_int4
from tests.engine.execution.models.test_gpu_experts import to_fp8_rows, to_nvfp4
from tests.engine.execution.models.test_quantized import WEIGHTS, Tensors, load_weights, quantize
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.execution.models.kinds import CAUSAL_LM
from conveyor_engine.execution.models.quantized.numbers import look_up_fp4

Store = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
CT = "compressed-tensors"
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def to_int8_rows(layer: str, weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(dim=-1, keepdim=True) / 127
    return {f"{layer}.weight": (weight / scales).round().to(torch.int8), f"{layer}.weight_scale": scales}


def to_fp8_blocks(size: int) -> Store:
    """Store a weight with a scale for blocks of so many rows and columns, as AutoRound and newer ModelOpt name it."""

    def store(layer: str, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        numbers = weight / scales.repeat_interleave(size, 0).repeat_interleave(size, 1)
        return {f"{layer}.weight": numbers.to(torch.float8_e4m3fn), f"{layer}.weight_scale_inv": scales}

    return store


def to_microscaled(bits: int) -> Store:
    """Store a weight as MXFP4 or MXFP8, with a power of two for 32 columns."""

    def store(layer: str, weight: torch.Tensor) -> Tensors:
        groups = weight.unflatten(1, (-1, 32))
        exponents = (groups.abs().amax(dim=-1) / (6 if bits == 4 else 448)).log2().ceil()
        values, scales = groups / exponents.exp2()[..., None], (exponents + 127).to(torch.uint8)
        if bits == 8:
            numbers = values.to(torch.float8_e4m3fn).flatten(1)
            return {f"{layer}.weight": numbers, f"{layer}.weight_scale": scales}
        nibbles = (values[..., None] - look_up_fp4(torch.arange(16))).abs().argmin(dim=-1).flatten(1)
        packed = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8)
        return {f"{layer}.weight_packed": packed, f"{layer}.weight_scale": scales}

    return store


def as_quark(store: Store) -> Store:
    """Name packed numbers as Quark does."""
    return lambda layer, weight: {
        name.replace("weight_packed", "weight"): tensor for name, tensor in store(layer, weight).items()
    }


def to_nf4(layer: str, weight: torch.Tensor) -> Tensors:
    """Store a weight as bitsandbytes does with `bnb_4bit_quant_storage: bfloat16`, and blocks of 64 numbers."""
    table = torch.tensor([-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1])
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(dim=1)
    numbers = ((blocks / scales[:, None])[..., None] - table).abs().argmin(dim=-1).flatten()
    packed = (numbers[::2] << 4 | numbers[1::2]).to(torch.uint8).view(torch.bfloat16)[:, None]
    state = f'{{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": {list(weight.shape)}}}'
    return {
        f"{layer}.weight": packed,
        f"{layer}.weight.absmax": scales,
        f"{layer}.weight.quant_map": table,
        f"{layer}.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }


@dataclass(frozen=True)
class Report:
    """A checkpoint of a report. rules: how layers are stored, by the first expression that is found in their names.

    more: further tensors for each stored layer, by the end of their names. rename: changes a tensor's name.
    """

    kind: str
    settings: Mapping[str, Any]
    rules: Mapping[str, Store]
    sizes: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    more: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rename: Callable[[str], str] = str

    def write(self, folder: Path) -> tuple[Any, Tensors]:
        """Write the checkpoint, except for its declaration. Return the original model, and its weights as loaded."""
        model = save_tiny_model(self.kind, folder, **self.sizes)
        original = load_weights(folder, CAUSAL_LM)

        def change(layer: str, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
            store = next((each for rule, each in self.rules.items() if re.search(rule, layer)), None)
            if store is None or weight.dim() != 2:
                return keep(layer, weight)
            return {**store(layer, weight), **{f"{layer}.{end}": tensor.clone() for end, tensor in self.more.items()}}

        quantize(folder, change)
        stored = {self.rename(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        return model, original


def kinds_of(*weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"config_groups": {f"group_{number}": {"weights": each} for number, each in enumerate(weights)}}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_EXPERTS = {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 64}
_LAYER = r"layers\..*proj"
SCALE = torch.tensor(0.02)

SERVED: dict[str, Report] = {
    "vllm#54900: Quark's MXFP4, attention in FP8": Report(
        "deepseek_v3",
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}},
        {r"self_attn\..*(q_a|q_b|kv_a|kv_b|o)_proj": to_fp8_rows, r"mlp\..*proj": as_quark(to_microscaled(4))},
        _EXPERTS,
    ),
    "llm-compressor#959: W8A8": Report("llama", {"quant_method": CT, **kinds_of(INT8)}, {_LAYER: to_int8_rows}),
    "llm-compressor#967: Starcoder 2 with scales of an 8-bit cache": Report(
        "starcoder2",
        {"quant_method": CT, **kinds_of(INT8), "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"(q_proj|k_proj)": to_int8_rows, r"layers\..*(c_fc|c_proj|v_proj|o_proj)": to_int8_rows},
        more={"k_scale": SCALE, "v_scale": SCALE},
        rename=lambda name: re.sub(r"\w_proj\.([kv]_scale)", r"\1", name),
    ),
    "vllm#31623: queries, keys and values, and gate and up, in different formats": Report(
        "qwen3",
        {"quant_method": CT, "format": "mixed-precision", **kinds_of(INT4, FP8, INT8)},
        {"q_proj|up_proj": to_int4, "k_proj|gate_proj": to_int8_rows, "v_proj|down_proj": to_fp8_rows},
    ),
    "vllm#11790: the MLP alone": Report("llama", {"quant_method": CT, **kinds_of(INT4)}, {r"mlp\..*proj": to_int4}),
    "vllm#10590: bitsandbytes' numbers stored as bfloat16": Report(
        "llama", {"quant_method": "bitsandbytes", "load_in_4bit": True}, {_LAYER: to_nf4}
    ),
    "vllm#42813: Gemma with an encoder of images in 4 bits": Report(
        "gemma3",
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {r"language_model\..*proj|vision_tower\..*(proj|fc\d)$": to_nf4},
        {},
    ),
    "vllm#46311: AutoRound's experts in 4 bits, attention in FP8": Report(
        "qwen3_moe",
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32},
        {r"self_attn\..*proj": to_fp8_blocks(32), r"experts\.": to_gptq},
        _EXPERTS,
    ),
    "vllm#47434: AutoRound's FP8": Report(
        "llama",
        {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "weight_block_size": [32, 32], "bits": 8},
        {_LAYER: to_fp8_blocks(32)},
    ),
    "vllm#51248: AutoRound's MXFP8": Report(
        "qwen3_moe",
        {"quant_method": "auto-round", "packing_format": "auto_round:mx_fp", "bits": 8, "group_size": 32},
        {r"experts\.|self_attn\..*proj": to_microscaled(8)},
        _EXPERTS,
    ),
    "llm-compressor#2730: MXFP4 and MXFP8": Report(
        "qwen3",
        {"quant_method": CT, "format": "mixed-precision", **kinds_of({"num_bits": 4, "type": "float"}, FP8)},
        {r"mlp\..*proj": to_microscaled(4), r"self_attn\..*proj": to_microscaled(8)},
    ),
    "vllm#54126: ModelOpt's FP8 in blocks beside NVFP4": Report(
        "qwen3",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8_BLOCK_SCALES"}},
        },
        {r"mlp\..*proj": to_nvfp4, r"self_attn\..*proj": to_fp8_blocks(128)},
        {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64},
    ),
    "vllm#54304: embeddings in 4 bits": Report(
        "qwen3", {"quant_method": CT, **kinds_of(INT4)}, {rf"embed_tokens|{_LAYER}": to_int4}
    ),
    "vllm#45535: embeddings in 4 bits that the head shares": Report(
        "qwen3",
        {"quant_method": CT, **kinds_of(INT4)},
        {rf"embed_tokens|{_LAYER}": to_int4},
        {**SIZES, "tie_word_embeddings": True},
    ),
    "llm-compressor#2714: Gemma 4 with its router in FP8": Report(
        "gemma4_text",
        {"quant_method": CT, **kinds_of(FP8)},
        {rf"{_LAYER}|router": to_fp8_rows},
        {**SIZES, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "auto-round#1464: experts of Qwen3.5 one by one": Report(
        "qwen3_5_moe_text",
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32},
        {r"experts\.\d": to_gptq},
        {"hidden_size": 64},
    ),
    "auto-round#2174: numbers of 4 and 8 bits in one layer": Report(
        "llama", {"quant_method": CT, **kinds_of(INT4, INT8)}, {"q_proj|gate_proj": to_int4, _LAYER: to_int8_rows}
    ),
}


def name_experts(name: str) -> str:
    """Return the name that llm-compressor gives to experts of gpt-oss, which it stores one by one."""
    return re.sub("(gate_up_proj|down_proj)", r"0.\1.weight_packed", name)


REFUSED: dict[str, tuple[Report, str]] = {
    "llm-compressor#959: W8A8 without its declaration": (
        Report("llama", {}, {_LAYER: to_int8_rows}),
        ".weight is stored as I8, and no file declares a format",
    ),
    "vllm#18718: AWQ with scales of an activation": (
        Report(
            "llama",
            {"quant_method": "awq", "bits": 4, "group_size": 32},
            {"down_proj": to_awq},
            more={"act_fn.scales": torch.ones(128)},
            rename=lambda name: name.replace("down_proj.act_fn", "act_fn"),
        ),
        "mlp.act_fn.scales) in a way that this engine does not read",
    ),
    "vllm#40358: experts of gpt-oss that llm-compressor stores one by one": (
        Report("gpt_oss", {"quant_method": CT, **kinds_of(INT4)}, {}, {"hidden_size": 64}, rename=name_experts),
        "the model's class has no model.layers.0.mlp.experts.0.down_proj.weight_packed",
    ),
    "llm-compressor#2568: names with a part too many": (
        Report(
            "qwen3_5_moe",
            {"quant_method": CT, **kinds_of(INT8)},
            {r"language_model\..*self_attn.*proj": to_int8_rows},
            {},
            rename=lambda name: name.replace("language_model.", "language_model.language_model."),
        ),
        "are not those of its config.json: 53 missing keys, first model.embed_tokens.weight",
    ),
}
