"""Makes tiny random models that embed as their authors save them, and computes transformers' vectors of single prompts.

The vectors are pooled here by hand, as sentence-transformers does it, from an unpadded batch of one.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

VOCAB_SIZE = 199
CONTEXT_TOKENS = 64
SIZE = 48
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_OWN: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "xlm-roberta": {"max_position_embeddings": CONTEXT_TOKENS + 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 5},
    "mpnet": {"max_position_embeddings": CONTEXT_TOKENS + 2},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": CONTEXT_TOKENS},
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_buckets": 8,
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
    },
    # EmbeddingGemma: tokens attend to both sides, within 4 tokens in two of three layers.
    "gemma3_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "modernbert": {
        "local_attention": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "classifier_pooling": "mean",
    },
}
# What the files beside the weights say: pooling mode, whether there is a Normalize step.
FILES: dict[str, tuple[str, bool]] = {
    "bert": ("pooling_mode_mean_tokens", True),
    "qwen3": ("pooling_mode_lasttoken", True),
    "xlm-roberta": ("pooling_mode_cls_token", True),
    "mistral": ("pooling_mode_lasttoken", False),
    "modernbert": ("pooling_mode_cls_token", True),
    "gemma3_text": ("pooling_mode_mean_tokens", True),
    "mpnet": ("pooling_mode_mean_tokens", True),
    "deberta-v2": ("pooling_mode_cls_token", True),
}
KINDS = tuple(FILES)


def save_encoder(kind: str, directory: Path, auto_class: Any = AutoModel, **changes: Any) -> PreTrainedModel:
    """Save only weights and config.json. Returns the model in float32, which may have a head."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(_COMMON | _OWN.get(kind, {}) | changes))
    model: PreTrainedModel = auto_class.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(directory)
    return model


def write_sentence_files(
    directory: Path, mode: str, *, normalizes: bool, max_seq_length: int | None = None, num_dense: int = 0
) -> None:
    """Write sentence-transformers' files as it saves them. `write_dense` writes those of `num_dense` layers."""
    steps = [("", "Transformer"), ("1_Pooling", "Pooling")]
    steps += [(f"{number + 2}_Dense", "Dense") for number in range(num_dense)]
    steps += [(f"{num_dense + 2}_Normalize", "Normalize")] * normalizes
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(steps)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    pooling: dict[str, Any] = {f"pooling_mode_{flag}": f"pooling_mode_{flag}" == mode for flag in flags}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE, **pooling}))
    limits = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (directory / "sentence_bert_config.json").write_text(json.dumps(limits))


def write_dense(directory: Path, linear: nn.Linear, activation: str = "linear.Identity", **changes: Any) -> None:
    """Write a layer behind the pooling as sentence-transformers saves it."""
    directory.mkdir(exist_ok=True)
    config = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": linear.bias is not None}
    config |= {"activation_function": f"torch.nn.modules.{activation}"} | changes
    (directory / "config.json").write_text(json.dumps(config))
    weights = {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    save_file(weights, directory / "model.safetensors")


def embed(
    model: PreTrainedModel, prompt: list[int], mode: str, *, normalizes: bool, dimensions: int | None = None
) -> torch.Tensor:
    """Return transformers' vector: float32 (dimensions,)."""
    with torch.inference_mode():
        hidden = model(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0]
    pools = {"pooling_mode_mean_tokens": hidden.mean(0), "pooling_mode_lasttoken": hidden[-1]}
    vector = pools.get(mode, hidden[0])[:dimensions]
    return functional.normalize(vector, dim=0) if normalizes else vector


def write_served_encoder(kind: str, directory: Path, **changes: Any) -> PreTrainedModel:
    """Write a complete directory: the model, its files, and a tokenizer with special tokens around a text."""
    from tests.engine.chat_model import END, USER, VOCABULARY, write_tokenizer
    from tokenizers import Tokenizer, processors

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    template = f"{USER} $A {END}" if kind == "bert" else f"$A {END}"
    special_tokens = [(token, tokenizer.token_to_id(token)) for token in (USER, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)
    tokenizer.save(path)
    model = save_encoder(kind, directory, **({"vocab_size": VOCABULARY, "max_position_embeddings": 512} | changes))
    mode, normalizes = FILES[kind]
    write_sentence_files(directory, mode, normalizes=normalizes)
    return model
