"""Tiny random models of each supported kind, made so that parity with transformers cannot hold by accident.

Untied embeddings and a wide initialisation give many different output tokens; windows are shorter than the
prompts, soft caps low, and scalings unlike head_dim ** -0.5, so that each feature changes the answer.
"""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 199
WINDOW = 7
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_LOCAL_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention"]
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_AND_FULL,
        "query_pre_attn_scalar": 3,
        "attn_logit_softcapping": 2.0,
    },
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_AND_FULL,
        "query_pre_attn_scalar": 3,
    },
    "gpt_neox": {},
    "qwen3_5_text": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_AND_FULL,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}
KINDS = tuple(_OWN)  # tried under every hardship; the following in continuous mode
_GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
_LATENT_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [2]},
    "cohere2": {"sliding_window": WINDOW, "layer_types": _LOCAL_AND_FULL},
    "deepseek_v2": _LATENT | _LATENT_EXPERTS | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT | _LATENT_EXPERTS,
    "falcon_h1": {
        **_MAMBA,
        "head_dim": 16,
        "mamba_d_ssm": 96,
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.5, 0.25, 0.75, 1.5, 0.5],
    },
    "gemma": {"head_dim": 16},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": _LOCAL_AND_FULL,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "glm4": {"head_dim": 12},
    "glm4_moe_lite": _LATENT | _LATENT_EXPERTS,
    "gpt2": {"n_positions": 128},
    "granite": {"attention_multiplier": 0.7},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "granite_swa": {"sliding_window": WINDOW, "layer_types": _LOCAL_AND_FULL},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "mimo_v2_flash": {
        "head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "sliding_window": WINDOW,
    },
    "minicpm3": _LATENT,
    "ministral": {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _LOCAL_AND_FULL},
    "mixtral": {"num_local_experts": 4, "sliding_window": WINDOW},
    "nemotron_h": {
        "head_dim": 16,
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    "olmo2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 48, "init_std": 0.3},
    "olmo_hybrid": _GATED_DELTA,
    "phi": {"hidden_size": 64},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3_5_moe_text": _GATED_DELTA
    | {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_next": _GATED_DELTA
    | {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "starcoder2": {"sliding_window": WINDOW},
}
_SIZES = {"hidden_size": 32, "intermediate_size": 48}
_TOWER = _SIZES | {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14, "image_size": 28}
_QWEN_TOWER = _SIZES | {"depth": 2, "num_heads": 4, "patch_size": 4, "out_hidden_size": 48}
_IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": _COMMON | _OWN["gemma3_text"],
        "vision_config": _TOWER,
        "mm_tokens_per_image": 4,
    },
    "internvl": {"text_config": _COMMON | {"model_type": "qwen2"}, "vision_config": _TOWER},
    "llava_onevision": {
        "text_config": _COMMON | {"model_type": "qwen2"},
        "vision_config": _TOWER | {"model_type": "siglip_vision_model"},
    },
    "mistral3": {
        "text_config": _COMMON | {"model_type": "mistral", "head_dim": 16},
        "vision_config": _TOWER | {"model_type": "pixtral"},
    },
    "qwen2_5_vl": {
        "text_config": _COMMON | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]}},
        "vision_config": _QWEN_TOWER,
    },
    "qwen3_vl": {
        "text_config": _COMMON
        | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
        "vision_config": _QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    },
}
IMAGE_TEXT_KINDS = tuple(_IMAGE_TEXT)
# The most downloaded checkpoint of 2026 (Qwen3.6-35B-A3B-FP8) has its parts: images, states, experts, and FP8.
_IMAGE_TEXT["qwen3_5_moe"] = {
    "text_config": _COMMON
    | _OTHERS["qwen3_5_moe_text"]
    | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
    "vision_config": _QWEN_TOWER | {"num_position_embeddings": 16},
}
# transformers 5.17 hands LFM2's convolution no keyword arguments, so the engine rejects the model.
REJECTED = set() if "kwargs" in signature(Lfm2ShortConv.forward).parameters else {"lfm2", "lfm2_moe"}
OTHER_KINDS = tuple(kind for kind in (*_OTHERS, *_IMAGE_TEXT) if kind not in REJECTED)
_WITH_STATES = ("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid")
LATENT_KINDS = tuple(kind for kind, values in _OTHERS.items() if "kv_lora_rank" in values)
WITH_STATES = frozenset({*_WITH_STATES, "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})
_IMAGE_TOKENS = {"image_token_id": VOCAB_SIZE - 1, "video_token_id": VOCAB_SIZE - 2}


def make_config(kind: str, **changes: Any) -> PretrainedConfig:
    if kind in _IMAGE_TEXT:
        return AutoConfig.for_model(kind, **_IMAGE_TEXT[kind], **_IMAGE_TOKENS, tie_word_embeddings=False, **changes)
    return AutoConfig.for_model(kind, **(_COMMON | (_OWN | _OTHERS).get(kind, {}) | changes))


def make_model(kind: str, config: PretrainedConfig, attn_implementation: str) -> PreTrainedModel:
    auto_class = AutoModelForImageTextToText if kind in _IMAGE_TEXT else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_config(config, attn_implementation=attn_implementation).eval()
    return model


def save_tiny_model(kind: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Makes the model of that kind, always the same one, and saves it; returns it in fp32 for reference."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = make_config(kind, **changes)
    model = make_model(kind, config, "eager")
    for name, parameter in model.named_parameters():
        if "sink" in name:  # zeros would hide which head has which
            torch.nn.init.normal_(parameter, 0.0, 1.0)
    model.save_pretrained(directory)
    return model


def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """What transformers' own `generate` continues the prompt with: batch 1, eager attention."""
    input_ids = torch.tensor([prompt])
    out = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens
