"""Writes tiny models as llama.cpp's converter does, with the package gguf: names, order of rows, norms, metadata."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants
from gguf.constants import MODEL_ARCH, LlamaFileType, RopeScalingType
from gguf.tensor_mapping import get_tensor_name_map
from transformers import PreTrainedModel

Array = npt.NDArray[Any]
ARCHITECTURES = {
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "gemma4_text": MODEL_ARCH.GEMMA4,
    "gpt_oss": MODEL_ARCH.GPT_OSS,
    "granite": MODEL_ARCH.GRANITE,
    "llama": MODEL_ARCH.LLAMA,
    "phi3": MODEL_ARCH.PHI3,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
}
# Where GGUF's name is another.
NAMES = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}
BLOCK = {"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}  # which the package does not write


def write_model(model: PreTrainedModel, path: Path, kind: str = "F32", **more: Any) -> dict[str, torch.Tensor]:
    """Write the model. Return its weights as the file has them, under their names in the model.

    more: `tokens` (texts of the vocabulary), `merges`, `chat_template`, truth `values` of the tokenizer, and `extra`
    tensors.
    """
    config = model.config
    writer = GGUFWriter(path, NAMES.get(config.model_type, config.model_type))
    tokens = more.pop("tokens", None) or ["t", "1", *(f"t{number}" for number in range(1, config.vocab_size - 1))]
    special = {"bos": 0, "eos": 5, "padding": 0}
    write_tokens(writer, tokens, more.pop("merges", ["t 1"]), more.pop("chat_template", None), **special)
    write_numbers(writer, config)
    for key, value in more.pop("values", {}).items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    for name, values in more.pop("extra", {}).items():
        writer.add_tensor(name, values)
    assert not more
    weights = write_weights(writer, model, kind)
    finish(writer)
    return weights


def write_tokens(
    writer: GGUFWriter, tokens: Sequence[str], merges: Sequence[str], chat_template: str | None = None, **special: int
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    if chat_template:
        writer.add_chat_template(chat_template)
    for key, token in special.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)


def write_numbers(writer: GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if config.model_type != "gemma4_text":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma4_text":
        write_numbers_of_gemma4(writer, config)
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("gpt_oss", "qwen3_moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))


def write_numbers_of_gemma4(writer: GGUFWriter, config: Any) -> None:
    local = [each == "sliding_attention" for each in config.layer_types]
    layers = [config.per_layer_config[number] for number in range(config.num_hidden_layers)]
    writer.add_sliding_window_pattern(local)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_head_count_kv([each.num_key_value_heads for each in layers])
    first_shared = len(layers) - config.num_kv_shared_layers
    doubled = range(first_shared, len(layers)) if config.use_double_wide_mlp else ()
    writer.add_feed_forward_length([config.intermediate_size * (1 + (i in doubled)) for i in range(len(layers))])
    head_dim = layers[local.index(False)].head_dim
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_key_length_swa(layers[local.index(True)].head_dim)
    writer.add_value_length_swa(layers[local.index(True)].head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    rotated = int(head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = np.array([1.0] * rotated + [1e30] * (head_dim // 2 - rotated), dtype=np.float32)
    write_tensor(writer, "rope_freqs.weight", factors, "F32")
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def write_weights(writer: GGUFWriter, model: PreTrainedModel, kind: str) -> dict[str, torch.Tensor]:
    config, stored = model.config, {}
    names = get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    state = {name: tensor for name, tensor in model.state_dict().items() if not is_tied(model, name)}
    for name, tensor in state.items():
        written = []
        for part, values in split_experts(config, name, tensor).items():
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if part:
                end = "bias" if name.endswith("bias") else "weight"
                found = f"blk.{name.split('.')[2]}.ffn_{part}_exps.{end}"
            found = found or OWN_NAMES.get(".".join(name.split(".")[3:]), "").format(name.split(".")[2])
            assert found, name
            found += ".weight" if name.endswith(("sinks", "scalar")) else ""
            changed = change(config, name, values)
            read = write_tensor(writer, found, changed.float().numpy(), kind if changed.dim() > 1 else "F32")
            written.append(change(config, name, torch.from_numpy(read.copy()), back=True))
        stored[name] = join_experts(config, name, written)
    if "rope_type" in config.rope_parameters and config.rope_parameters["rope_type"] == "llama3":
        write_tensor(writer, "rope_freqs.weight", llama3_factors(config), "F32")
    writer.add_file_type(LlamaFileType[FILE_TYPES.get(kind, f"MOSTLY_{kind}")])
    return stored


def split_experts(config: Any, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the parts that llama.cpp stores, by their names; the tensor itself if it has no experts."""
    is_gpt_oss = config.model_type == "gpt_oss"
    if "experts.gate_up_proj" not in name and "experts.down_proj" not in name:
        return {"": tensor}
    if config.model_type == "gemma4_text":
        return {"gate_up" if "gate_up" in name else "down": tensor}
    if is_gpt_oss and tensor.dim() == 3:
        tensor = tensor.transpose(1, 2)
    if "down_proj" in name:
        return {"down": tensor.contiguous()}
    gate, up = (tensor[:, ::2], tensor[:, 1::2]) if is_gpt_oss else tensor.chunk(2, dim=1)
    return {"gate": gate.contiguous(), "up": up.contiguous()}


def join_experts(config: Any, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if config.model_type != "gpt_oss" or "experts" not in name:
        return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]
    joined = torch.stack(list(parts), dim=2).flatten(1, 2) if len(parts) > 1 else parts[0]
    return joined.transpose(1, 2) if joined.dim() == 3 else joined


OWN_NAMES = {  # which llama.cpp's converter writes without the table of the package
    "router.scale": "blk.{}.ffn_gate_inp.scale",
    "router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
}
FILE_TYPES = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_M", "Q5_K": "MOSTLY_Q5_K_M", "MXFP4": "MOSTLY_MXFP4_MOE"}


def is_tied(model: PreTrainedModel, name: str) -> bool:
    return name == "lm_head.weight" and bool(model.config.tie_word_embeddings)


def change(config: Any, name: str, tensor: torch.Tensor, back: bool = False) -> torch.Tensor:
    """Return the tensor as llama.cpp stores it, or what that stands for."""
    if config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return tensor - 1 if back else tensor + 1
    if config.model_type not in ("granite", "llama"):
        return tensor
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = (heads, -1, 2, *tensor.shape[1:]) if back else (heads, 2, -1, *tensor.shape[1:])
    return tensor.reshape(halves).swapaxes(1, 2).reshape(tensor.shape)


def llama3_factors(config: Any) -> Array:
    """As in llama.cpp's `convert_hf_to_gguf.py`."""
    rope, dim = config.rope_parameters, config.head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        length = 2 * math.pi / frequency
        if length < old / high:
            factors.append(1.0)
        elif length > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return np.array(factors, dtype=np.float32)


def write_tensor(writer: GGUFWriter, name: str, values: Array, kind: str) -> Array:
    """Write a tensor, and return its numbers as the package gguf restores them."""
    number_type = GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values)
        return values
    packed = random_blocks(values, kind) if kind in BLOCK else quants.quantize(values, number_type)
    writer.add_tensor(name, packed, raw_dtype=number_type)
    return quants.dequantize(packed, number_type)


def random_blocks(values: Array, kind: str) -> Array:
    """Return random blocks with small scales: any bytes are valid numbers, but their scales are 16-bit floats."""
    numbers, num_bytes = BLOCK[kind]
    blocks = values.size // numbers
    packed = np.random.default_rng(blocks).integers(0, 256, (blocks, num_bytes), dtype=np.uint8)
    scales = np.full(blocks, 0.0008, dtype=np.float16).view(np.uint8).reshape(blocks, 2)
    if kind == "Q6_K":
        packed[:, -2:] = scales // np.uint8(1)
        packed[:, 192:208] %= 64
    else:
        packed[:, 0:2], packed[:, 2:4] = scales, scales
    return packed.reshape(*values.shape[:-1], -1)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(path: Path) -> None:
    """Write the model again in two files, as llama.cpp's `llama-gguf-split` does."""
    reader = GGUFReader(path)
    tensors = list(reader.tensors)
    for number, part in enumerate((tensors[:4], tensors[4:])):
        writer = GGUFWriter(path.with_name(f"{path.stem}-{number + 1:05}-of-00002.gguf"), "qwen2")
        if not number:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    inner = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(field.name, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for tensor in part:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)


_HYBRID: dict[str, tuple[int, ...]] = {
    "blk.0.attn_qkv.weight": (96, 64), "blk.0.attn_gate.weight": (32, 64), "blk.0.ssm_alpha.weight": (4, 64),
    "blk.0.ssm_beta.weight": (4, 64), "blk.0.ssm_conv1d.weight": (96, 4), "blk.0.ssm_norm.weight": (8,),
    "blk.0.ssm_out.weight": (64, 32), "blk.0.ssm_a": (4,), "blk.0.ssm_dt.bias": (4,),
    "blk.1.attn_q.weight": (128, 64), "blk.1.attn_k.weight": (32, 64), "blk.1.attn_v.weight": (32, 64),
    "blk.1.attn_output.weight": (64, 64), "blk.1.attn_q_norm.weight": (16,), "blk.1.attn_k_norm.weight": (16,),
    **{f"blk.{layer}.{name}.weight": (64,) for layer in (0, 1) for name in ("attn_norm", "post_attention_norm")},
    "output_norm.weight": (64,),
}  # fmt: skip
_EXPERTS = {
    f"blk.{layer}.{name}.weight": shape
    for layer in (0, 1)
    for name, shape in {
        "ffn_gate_inp": (4, 64), "ffn_gate_exps": (4, 32, 64), "ffn_up_exps": (4, 32, 64), "ffn_down_exps": (4, 64, 32),
        "ffn_gate_inp_shexp": (64,), "ffn_gate_shexp": (32, 64), "ffn_up_shexp": (32, 64), "ffn_down_shexp": (64, 32),
    }.items()
}  # fmt: skip
_DENSE = {f"blk.{layer}.ffn_{name}.weight": (64, 64) for layer in (0, 1) for name in ("gate", "up", "down")}
_CONVOLUTIONS: dict[str, tuple[int, ...]] = {
    "blk.0.shortconv.in_proj.weight": (192, 64), "blk.0.shortconv.out_proj.weight": (64, 64),
    "blk.0.shortconv.conv.weight": (64, 3), "token_embd_norm.weight": (64,),
    "blk.1.attn_q.weight": (64, 64), "blk.1.attn_k.weight": (32, 64), "blk.1.attn_v.weight": (32, 64),
    "blk.1.attn_output.weight": (64, 64), "blk.1.attn_q_norm.weight": (16,), "blk.1.attn_k_norm.weight": (16,),
    **{f"blk.{layer}.{name}_norm.weight": (64,) for layer in (0, 1) for name in ("attn", "ffn")},
}  # fmt: skip
OF_TRANSFORMERS = {"lfm2": _DENSE | _CONVOLUTIONS, "qwen35": _DENSE | _HYBRID, "qwen35moe": _EXPERTS | _HYBRID}


def write_random(path: Path, architecture: str) -> None:
    """Write random weights for two layers, of which the second has attention."""
    writer, random = GGUFWriter(path, architecture), np.random.default_rng(0)
    write_tokens(writer, ["t", "1", *(f"t{number}" for number in range(1, 198))], ["t 1"], bos=0, eos=5, padding=0)
    is_lfm = architecture == "lfm2"
    for key, value in {
        "block_count": 2, "context_length": 128, "embedding_length": 64, "feed_forward_length": 64,
        "attention.head_count": 4, "attention.key_length": 16, "rope.dimension_count": 16, "full_attention_interval": 2,
        "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32,
        "shortconv.l_cache": 3, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
    }.items():  # fmt: skip
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_head_count_kv([0, 2] if is_lfm else 2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_array(f"{architecture}.rope.dimension_sections", [3, 3, 2, 0])
    shapes = {"token_embd.weight": (199, 64), "output.weight": (199, 64), **OF_TRANSFORMERS[architecture]}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        values = -np.exp(values) if name.endswith("ssm_a") else values
        write_tensor(writer, name, values, "Q8_0" if len(shape) > 1 and shape[-1] % 32 == 0 else "F32")
    finish(writer)
