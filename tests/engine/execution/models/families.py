"""Makes tiny random models of many families, with attention that needs no cache. The tests of `fuse` use them."""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel

from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.attention.backend import AttentionSpec

_SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {"num_key_value_heads": 2}
_HEADS = _GQA | {"head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _HEADS | {"attention_bias": True},
    "Qwen2": _GQA,
    "Qwen3": _HEADS,
    "Mistral": _HEADS | {"sliding_window": 5},
    "Gemma": _HEADS,
    "Gemma2": _HEADS | {"sliding_window": 5},
    "Gemma3Text": _HEADS | {"sliding_window": 5},
    "GPTNeoX": {},
    "Phi": _GQA,
    "Phi3": _GQA,
    "Olmo2": _GQA,
    "Granite": _GQA,
    "Cohere": _GQA,  # it rotates neighbouring dimensions, so its attention is not replaced
    "Glm": _HEADS,
    "Mixtral": _HEADS,
}


class Dense:
    """A `Paged` for one whole sequence. It ignores windows and caps, which the tests of attention check."""

    def __init__(self) -> None:
        self.specs: list[AttentionSpec] = []

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.specs.append(spec)
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        heads = (x.transpose(0, 1)[None] for x in (query, key, value))
        return functional.scaled_dot_product_attention(*heads, is_causal=True, scale=spec.scaling)[0].transpose(0, 1)


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    interface.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(_SMALL | FAMILIES[family] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=interface.IMPLEMENTATION
    ).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of ones (or zeros) would hide a wrong formula
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel, paged: Dense | None = None) -> torch.Tensor:
    tokens = torch.randint(3, 300, (1, 23), generator=torch.Generator().manual_seed(1)).to(model.device)
    positions = torch.arange(23, device=model.device)[None]
    logits: torch.Tensor = model(tokens, position_ids=positions, use_cache=False, paged=paged or Dense()).logits
    return logits.double().cpu()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
