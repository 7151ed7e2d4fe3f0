"""Builds transformers' config.json from the metadata of a GGUF file. Called by `unpack`.

llama.cpp names the numbers of every architecture alike. What else an architecture has is in its function here. Three
architectures are read by transformers itself. An unknown one is rejected, and so is metadata that would change the
results and that transformers' class cannot follow.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from conveyor_engine.errors import ModelError
from conveyor_engine.gguf.header import Header
from conveyor_engine.gguf.numbers import read_each, read_floats, read_number, read_rope, read_theta

Config = dict[str, Any]
_TOKENS: Final = {"bos": "bos", "eos": "eos", "pad": "padding"}  # GGUF's names
_TOKENS_KEY: Final = "tokenizer.ggml.tokens"
_GEMMA_27B_LAYERS: Final = {"gemma2": 46, "gemma3": 62}  # llama.cpp knows the model by them, as no number says it


def build_config(header: Header) -> Config:
    """Return the content of config.json. Raises ModelError."""
    name = header.architecture
    if name not in BUILDERS:
        raise ModelError(
            f"the GGUF file has the architecture {name!r}; this engine reads {', '.join(sorted(BUILDERS))}: use the "
            "model's safetensors"
        )
    tokens = {f"{key}_token_id": _find_token(header, stored) for key, stored in _TOKENS.items()}
    config = BUILDERS[name](header) | tokens
    return config | {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "format": header.file_type}}


def _find_token(header: Header, key: str) -> int | None:
    token, tokens = header.metadata.get(f"tokenizer.ggml.{key}_token_id"), header.metadata.get("tokenizer.ggml.tokens")
    is_known = type(token) is int and isinstance(tokens, list) and 0 <= token < len(tokens)
    return token if is_known else None


def _decoder(header: Header, model_type: str, class_name: str, **more: Any) -> Config:
    """Return what all decoders have."""
    heads = read_number(header, "attention.head_count", int)
    width = read_number(header, "embedding_length", int)
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or heads < 1:
        raise ModelError("the GGUF file has no token_embd.weight or no heads")
    head_dim = read_number(
        header, "attention.key_length", int, read_number(header, "rope.dimension_count", int, width // heads)
    )
    if read_number(header, "attention.value_length", int, head_dim) != head_dim:
        raise ModelError("the GGUF file has values that are longer than keys, which this engine does not read")
    if header.pools and header.find("pooling_type") != _LAST:
        raise ModelError("the GGUF file pools otherwise than by the last token, which this engine does not read")
    return {
        "model_type": model_type,
        "architectures": [f"{class_name}{'Model' if header.pools else 'ForCausalLM'}"],
        "vocab_size": embeddings.shape[0],
        "hidden_size": width,
        "num_hidden_layers": read_number(header, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": read_number(header, "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": read_number(header, "context_length", int),
        "rms_norm_eps": read_number(header, "attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": read_rope(header),
        **more,
    }


_LAST: Final = 3  # llama.cpp's number for pooling by the last token


def _feed_forward(header: Header) -> Config:
    return {"intermediate_size": read_number(header, "feed_forward_length", int)}


def _llama(header: Header) -> Config:
    if read_number(header, "expert_count", int, 0):
        raise ModelError("the GGUF file has a Llama with experts, which this engine does not read")
    bias = {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "mlp_bias": "blk.0.ffn_up.bias" in header.tensors}
    return _decoder(header, "llama", "Llama", **_feed_forward(header), **bias)


def _qwen2(header: Header) -> Config:
    return _decoder(header, "qwen2", "Qwen2", **_feed_forward(header))


def _qwen3(header: Header) -> Config:
    return _decoder(header, "qwen3", "Qwen3", **_feed_forward(header))


def _qwen3_moe(header: Header) -> Config:
    return _decoder(
        header,
        "qwen3_moe",
        "Qwen3Moe",
        num_experts=read_number(header, "expert_count", int),
        num_experts_per_tok=read_number(header, "expert_used_count", int),
        moe_intermediate_size=read_number(header, "expert_feed_forward_length", int),
        norm_topk_prob=True,
    )


def _gemma(header: Header, model_type: str, class_name: str) -> Config:
    config = _decoder(header, model_type, class_name, **_feed_forward(header))
    is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[header.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": read_number(header, "attention.sliding_window", int),
    }


def _gemma2(header: Header) -> Config:
    return _gemma(header, "gemma2", "Gemma2") | {
        "attn_logit_softcapping": read_number(header, "attn_logit_softcapping", float),
        "final_logit_softcapping": read_number(header, "final_logit_softcapping", float),
    }


def _gemma3(header: Header) -> Config:
    if header.find("final_logit_softcapping"):
        raise ModelError("the GGUF file caps logits of Gemma 3, which this engine does not read")
    config = _gemma(header, "gemma3_text", "Gemma3")
    whole = config["rope_parameters"]
    whole["rope_theta"] = read_theta(header, "rope.freq_base", 1_000_000.0)
    local = {"rope_type": "default", "rope_theta": read_theta(header, "rope.freq_base_swa", 10_000.0)}
    return config | {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def _gemma4(header: Header) -> Config:
    """Layers with a window have shorter heads than the others, and in some models the last layers have no keys."""
    layers = read_number(header, "block_count", int)
    is_local = read_each(header, "attention.sliding_window_pattern", layers)
    heads, widths = (read_each(header, key, layers) for key in ("attention.head_count_kv", "feed_forward_length"))
    if set(is_local) != {0, 1} or _FREQUENCIES not in header.tensors:
        raise ModelError(f"the GGUF file's layers are all alike, or it has no {_FREQUENCIES}")
    local, full = is_local.index(1), is_local.index(0)
    # Numbers by layer, and frequencies in place of the share that is rotated, are this architecture's own.
    tensors = {name: place for name, place in header.tensors.items() if name != _FREQUENCIES}
    plain = replace(
        header, metadata={**header.metadata, "gemma4.attention.head_count_kv": heads[local]}, tensors=tensors
    )
    rotated = read_floats(header, _FREQUENCIES)
    theta = read_theta(header, "rope.freq_base", 1_000_000.0)
    return _decoder(plain, "gemma4_text", "Gemma4") | {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "head_dim": read_number(header, "attention.key_length_swa", int),
        "global_head_dim": read_number(header, "attention.key_length", int),
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in header.tensors,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in is_local],
        "sliding_window": read_number(header, "attention.sliding_window", int),
        "num_kv_shared_layers": read_number(header, "attention.shared_kv_layers", int, 0),
        "final_logit_softcapping": read_number(header, "final_logit_softcapping", float, 0.0) or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": rotated.count(1.0) / len(rotated),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": read_theta(header, "rope.freq_base_swa", 10_000.0),
            },
        },
        **_per_layer_inputs(header),
        **_experts_of_gemma4(header),
    }


_FREQUENCIES: Final = "rope_freqs.weight"


def _per_layer_inputs(header: Header) -> Config:
    place = header.tensors.get("per_layer_token_embd.weight")
    width = read_number(header, "embedding_length_per_layer_input", int, 0)
    vocabulary = {} if place is None else {"vocab_size_per_layer_input": place.shape[0]}
    return {"hidden_size_per_layer_input": width, **vocabulary}


def _experts_of_gemma4(header: Header) -> Config:
    if not (count := read_number(header, "expert_count", int, 0)):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": read_number(header, "expert_used_count", int),
        "moe_intermediate_size": read_number(header, "expert_feed_forward_length", int),
    }


def _phi3(header: Header) -> Config:
    config = _decoder(header, "phi3", "Phi3", **_feed_forward(header))
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    original = read_number(header, "rope.scaling.original_context_length", int, config["max_position_embeddings"])
    if "rope_factors_long.weight" in header.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": read_floats(header, "rope_factors_long.weight"),
            "short_factor": read_floats(header, "rope_factors_short.weight"),
            "original_max_position_embeddings": original,
        }
    rope["partial_rotary_factor"] = read_number(header, "rope.dimension_count", int, head_dim) / head_dim
    return config | {
        "original_max_position_embeddings": original,
        "sliding_window": read_number(header, "attention.sliding_window", int, 0) or None,
    }


def _granite(header: Header) -> Config:
    """Its converter leaves out which of the numbers are 1, as llama.cpp then does not multiply."""
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    config = _decoder(header, "granite", "Granite", **_feed_forward(header))
    default = {"attention_multiplier": config["head_dim"] ** -0.5}
    return config | {name: read_number(header, key, float, default.get(name, 1.0)) for name, key in names.items()}


def _gpt_oss(header: Header) -> Config:
    config = _decoder(
        header,
        "gpt_oss",
        "GptOss",
        intermediate_size=read_number(header, "expert_feed_forward_length", int),
        num_local_experts=read_number(header, "expert_count", int),
        num_experts_per_tok=read_number(header, "expert_used_count", int),
        sliding_window=read_number(header, "attention.sliding_window", int),
        attention_bias=True,
    )
    config["rope_parameters"] |= {"truncate": False}  # as the original; llama.cpp has no number for it
    return config


def _by_transformers(header: Header) -> Config:
    from transformers.integrations.gguf import get_gguf_config

    try:
        tokens = {_TOKENS_KEY: len(header.metadata[_TOKENS_KEY])}  # transformers' reader counts them
        config: Config = get_gguf_config({**header.metadata, **tokens}, tuple(header.tensors))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"the GGUF file's metadata is not that of {header.architecture}: {error!r}") from error
    return config


BUILDERS: Final[Mapping[str, Callable[[Header], Config]]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "granite": _granite,
    "lfm2": _by_transformers,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen35": _by_transformers,
    "qwen35moe": _by_transformers,
    "qwen3moe": _qwen3_moe,
}
