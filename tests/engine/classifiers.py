"""Makes tiny random classifiers as their authors save them, and computes transformers' logits of single inputs."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.engine.encoders import CONTEXT_TOKENS, VOCAB_SIZE, save_encoder
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.classification import encode_token_types, read_logits
from conveyor_engine.wire.request import EngineRequest, FinishReason, RequestOutput

# What of each the head reads: BERT's pooler counts as part of its encoder, DistilBERT's attentions have no numbers.
KINDS = {
    "bert": "first",
    "xlm-roberta": "first",
    "distilbert": "first",
    "qwen3": "last",
    "llama": "last",
    "mpnet": "first",
    "deberta": "first",
    "deberta-v2": "first",
    "modernbert": "mean",  # of all tokens, with `classifier_pooling: mean`
}
LENGTHS = (1, 9, CONTEXT_TOKENS, 3, 3, 30, 17, 2, 25, 40)
_random = Random(0)
PROMPTS = [[_random.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
LABELS = ("sad", "so so", "glad")


def save_classifier(
    kind: str, directory: Path, num_labels: int = 3, *, per_token: bool = False, **changes: Any
) -> PreTrainedModel:
    """Save only weights and config.json. Returns the model in float32."""
    auto_class = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
    return save_encoder(kind, directory, auto_class, **({"num_labels": num_labels} | changes))


def split_types(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Return token types: the first half is one text and the rest another, if the model distinguishes them."""
    half = len(prompt) // 2
    return [0] * half + [int(getattr(model.config, "type_vocab_size", 1) > 1)] * (len(prompt) - half)


def classify(model: PreTrainedModel, prompt: list[int], token_types: list[int] | None = None) -> torch.Tensor:
    """Return transformers' logits: float32 (labels,), or (tokens, labels)."""
    types = {"token_type_ids": torch.tensor([token_types])} if token_types and any(token_types) else {}
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt]), **types).logits[0]
    return logits


def add(core: EngineCore, name: str, prompt: list[int], token_types: list[int], arrival: float = 0.0) -> None:
    payload = encode_token_types(token_types)
    core.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, payload=payload, arrival_time=arrival))


def logits_of(output: RequestOutput) -> torch.Tensor:
    assert output.finish_reason is FinishReason.STOP
    assert output.payload is not None
    return torch.tensor(read_logits(output.payload))


def write_served_classifier(kind: str, directory: Path, num_labels: int = 1, **changes: Any) -> PreTrainedModel:
    """Write a complete directory: the model, and a tokenizer with special tokens around a text and between texts."""
    from tests.engine.chat_model import END, USER, VOCABULARY, write_tokenizer
    from tokenizers import Tokenizer, processors

    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{USER} $A {END}",
        pair=f"{USER} $A {END} $B:1 {END}:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (USER, END)],
    )
    tokenizer.save(str(path))
    settings = directory / "tokenizer_config.json"
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * (kind == "bert")
    config = json.loads(settings.read_text()) | {"model_input_names": names, "model_max_length": 512}
    settings.write_text(json.dumps(config))
    # transformers scores the last token that is not padding, so padding must not be END, which is token 0.
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "pad_token_id": 1}
    return save_classifier(kind, directory, num_labels, **(sizes | changes))


def open_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return tokenizer
