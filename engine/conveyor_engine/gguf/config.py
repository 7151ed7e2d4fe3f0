"""Builds transformers' config.json from the metadata of a GGUF file. Called by `unpack`.

llama.cpp names the numbers of every architecture alike. What else an architecture has is in its function here. Three
architectures are read by transformers itself. An unknown one is rejected, and so is metadata that would change the
results and that transformers' class cannot follow.
"""

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from conveyor_engine.errors import ModelError
from conveyor_engine.gguf.header import Header

Config = dict[str, Any]
Number = TypeVar("Number", int, float)
LLAMA3_LIMITS: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
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


def _read(header: Header, key: str, kind: type[Number], default: Number | None = None) -> Number:
    """Return a number of the architecture. Raises ModelError."""
    value = header.find(key)
    if value is None and default is not None:
        return default
    if type(value) is int and kind is float:
        value = float(value)
    if type(value) is not kind or not math.isfinite(value):
        raise ModelError(f"the GGUF file's {header.architecture}.{key} is {str(value)[:100]}, not one {kind.__name__}")
    return value


def _decoder(header: Header, model_type: str, class_name: str, **more: Any) -> Config:
    """Return what all decoders have."""
    heads = _read(header, "attention.head_count", int)
    width = _read(header, "embedding_length", int)
    embeddings = header.tensors.get("token_embd.weight")
    if embeddings is None or heads < 1:
        raise ModelError("the GGUF file has no token_embd.weight or no heads")
    head_dim = _read(header, "attention.key_length", int, _read(header, "rope.dimension_count", int, width // heads))
    if _read(header, "attention.value_length", int, head_dim) != head_dim:
        raise ModelError("the GGUF file has values that are longer than keys, which this engine does not read")
    if header.pools and header.find("pooling_type") != _LAST:
        raise ModelError("the GGUF file pools otherwise than by the last token, which this engine does not read")
    return {
        "model_type": model_type,
        "architectures": [f"{class_name}{'Model' if header.pools else 'ForCausalLM'}"],
        "vocab_size": embeddings.shape[0],
        "hidden_size": width,
        "num_hidden_layers": _read(header, "block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _read(header, "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": _read(header, "context_length", int),
        "rms_norm_eps": _read(header, "attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _read_rope(header),
        **more,
    }


_LAST: Final = 3  # llama.cpp's number for pooling by the last token


def _read_rope(header: Header) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": _read_theta(header, "rope.freq_base", 10_000.0)}
    scaling = header.find("rope.scaling.type")
    if "rope_freqs.weight" in header.tensors:
        return rope | _read_llama3(header, rope["rope_theta"])
    factors = header.find("rope.scaling.factor"), header.find("rope.scale_linear")  # the second is the older name
    if scaling is None and (factor := next((each for each in factors if each), None)) not in (None, 1):
        return rope | {"rope_type": "linear", "factor": factor}
    if scaling in (None, "none", "longrope"):  # long and short factors are tensors
        return rope
    if scaling not in ("linear", "yarn"):
        raise ModelError(f"the GGUF file scales positions by {scaling!r}, which this engine does not read")
    rope |= {"rope_type": scaling, "factor": _read(header, "rope.scaling.factor", float)}
    if scaling == "yarn":
        original = _read(header, "rope.scaling.original_context_length", int)
        rope["original_max_position_embeddings"] = original
        if (attention := header.find("rope.scaling.attn_factor")) not in (None, 1.0):
            raise ModelError(f"the GGUF file scales attention by {attention!r}, which this engine does not read")
    return rope


def _read_theta(header: Header, key: str, default: float) -> float:
    theta = _read(header, key, float, default)
    if theta < 1:
        raise ModelError(f"the GGUF file's {header.architecture}.{key} is {theta}")
    return theta


def _read_llama3(header: Header, theta: float) -> Config:
    """Return the scaling of Llama 3 from the factors that llama.cpp stores in place of its numbers."""
    factors = read_floats(header, "rope_freqs.weight")
    scaling = {"rope_type": "llama3", "factor": max(factors)} | LLAMA3_LIMITS
    expected = _llama3_factors(scaling, theta, len(factors))
    if any(abs(found / each - 1) > 1e-3 for found, each in zip(factors, expected, strict=True)):
        raise ModelError("the GGUF file's rope_freqs.weight is not Llama 3's, so this engine does not read it")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, number: int) -> list[float]:
    """Return by how much each frequency is divided, as llama.cpp's converter computes it."""
    low, high, original = (scaling[key] for key in LLAMA3_LIMITS)
    factors = []
    for i in range(number):
        length = 2 * math.pi * theta ** (i / number)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors


def read_floats(header: Header, name: str) -> list[float]:
    """Return the numbers of a short tensor. Raises ModelError."""
    place = header.tensors[name]
    if place.kind.name != "F32" or place.num_bytes > 1 << 16:
        raise ModelError(f"the GGUF file's {name} is not a short tensor in 32 bits")
    values = list(struct.unpack(f"<{place.num_bytes // 4}f", place.read()))
    if not all(math.isfinite(value) and value > 0 for value in values):
        raise ModelError(f"the GGUF file's {name} has a number that is not positive")
    return values


def _feed_forward(header: Header) -> Config:
    return {"intermediate_size": _read(header, "feed_forward_length", int)}


def _llama(header: Header) -> Config:
    if _read(header, "expert_count", int, 0):
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
        num_experts=_read(header, "expert_count", int),
        num_experts_per_tok=_read(header, "expert_used_count", int),
        moe_intermediate_size=_read(header, "expert_feed_forward_length", int),
        norm_topk_prob=True,
    )


def _gemma(header: Header, model_type: str, class_name: str) -> Config:
    config = _decoder(header, model_type, class_name, **_feed_forward(header))
    is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[header.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return config | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": _read(header, "attention.sliding_window", int),
    }


def _gemma2(header: Header) -> Config:
    return _gemma(header, "gemma2", "Gemma2") | {
        "attn_logit_softcapping": _read(header, "attn_logit_softcapping", float),
        "final_logit_softcapping": _read(header, "final_logit_softcapping", float),
    }


def _gemma3(header: Header) -> Config:
    if header.find("final_logit_softcapping"):
        raise ModelError("the GGUF file caps logits of Gemma 3, which this engine does not read")
    config = _gemma(header, "gemma3_text", "Gemma3")
    whole = config["rope_parameters"]
    whole["rope_theta"] = _read_theta(header, "rope.freq_base", 1_000_000.0)
    local = {"rope_type": "default", "rope_theta": _read_theta(header, "rope.freq_base_swa", 10_000.0)}
    return config | {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def _phi3(header: Header) -> Config:
    config = _decoder(header, "phi3", "Phi3", **_feed_forward(header))
    rope, head_dim = config["rope_parameters"], config["head_dim"]
    original = _read(header, "rope.scaling.original_context_length", int, config["max_position_embeddings"])
    if "rope_factors_long.weight" in header.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": read_floats(header, "rope_factors_long.weight"),
            "short_factor": read_floats(header, "rope_factors_short.weight"),
            "original_max_position_embeddings": original,
        }
    rope["partial_rotary_factor"] = _read(header, "rope.dimension_count", int, head_dim) / head_dim
    return config | {
        "original_max_position_embeddings": original,
        "sliding_window": _read(header, "attention.sliding_window", int, 0) or None,
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
    return config | {name: _read(header, key, float, default.get(name, 1.0)) for name, key in names.items()}


def _gpt_oss(header: Header) -> Config:
    config = _decoder(
        header,
        "gpt_oss",
        "GptOss",
        intermediate_size=_read(header, "expert_feed_forward_length", int),
        num_local_experts=_read(header, "expert_count", int),
        num_experts_per_tok=_read(header, "expert_used_count", int),
        sliding_window=_read(header, "attention.sliding_window", int),
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
