"""The shapes of the models with random weights that are measured. Used by `systems` and the GPU suite."""

from typing import Any

from transformers import Qwen3Config

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "modes": {  # a step takes ten times as long as its scheduling, and 3,000 requests end within a quarter of an hour
        "num_hidden_layers": 2,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "vocab_size": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": False,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 1000,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM supports on a CPU
        "tie_word_embeddings": False,
        "initializer_range": 0.3,  # with a smaller range, all positions give the same token
    },
}


def model_config(shape: str) -> Qwen3Config:
    """Return the configuration of a model of this shape that never ends a text by itself."""
    return Qwen3Config(**SHAPES[shape], max_position_embeddings=40960, eos_token_id=None, bos_token_id=None)
