"""Makes the models that replace those of vLLM's tests, and a hub's cache that has them under the tests' names.

Their weights are random, except that the chat model is taught some answers and the model that ranks one question
(`lessons`). The chat model's tokenizer is trained on vLLM's documentation and tests, and its template is Qwen3's from
vLLM's source. Every library that uses the hub reads the hub's cache, so neither the tests nor the libraries change.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from e2e.peers_tests.lessons import teach, teach_to_rank
from e2e.peers_tests.templates import with_changes
from e2e.peers_tests.words import E5_PIECES, RERANKER_PIECES, make_qwen, make_xlmr

VOCABULARY = 12_000  # without the special tokens
CONTEXT_TOKENS = 40_960
END = "<|im_end|>"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", END)
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ENCODER: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
# The names that the tests give to each model.
NAMES = {
    "thinking": ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"),
    "chat": (
        "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct",
        "HuggingFaceH4/zephyr-7b-beta", "HuggingFaceTB/SmolLM2-135M-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "meta-llama/Llama-3.2-1B-Instruct", "NousResearch/Hermes-3-Llama-3.1-8B", "openai-community/gpt2",
        "meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-3B-Instruct",
        "mistralai/Mistral-7B-Instruct-v0.3",
    ),
    "e5": ("intfloat/multilingual-e5-small",),
    "embed": (
        "sentence-transformers/all-MiniLM-L12-v2", "BAAI/bge-base-en-v1.5", "Snowflake/snowflake-arctic-embed-m-v1.5",
        "intfloat/e5-small",
    ),
    "rerank": ("BAAI/bge-reranker-base",),
    "classify": ("jason9693/Qwen2.5-1.5B-apeach",),
    "none": (  # what is downloaded and not used
        "typeof/zephyr-7b-beta-lora", "charent/self_cognition_Alice", "minpeter/LoRA-Llama-3.2-1B-tool-vllm-ci",
    ),
}  # fmt: skip


def make(directory: Path, source: Path) -> None:
    """Write the models, and the hub's cache in `hub`. Takes a minute or two."""
    torch.manual_seed(0)
    tokenizer = _train_tokenizer(source)
    template = (source / "rust/src/chat/tests/templates/qwen3.jinja").read_text()
    _save_chat(directory / "thinking", tokenizer, template, source)
    with_changes(directory / "thinking", directory / "chat", "{%- set enable_thinking = false %}" + template)
    _save_embed(directory / "embed", _with_ends(tokenizer), 384)
    _save_embed(directory / "e5", make_xlmr(E5_PIECES), 384, pad_token="<pad>", eos_token="</s>")
    _save_classifier(directory / "rerank", make_xlmr(RERANKER_PIECES), None, pad_token="<pad>", eos_token="</s>")
    _save_classifier(directory / "classify", make_qwen(), ("Default", "Spoiled"), chat_template=CHAT_TEMPLATE)
    (directory / "none").mkdir()
    (directory / "none" / "config.json").write_text("{}")
    for model, names in NAMES.items():
        for name in names:
            _link(directory / "hub", name, directory / model)


def _train_tokenizer(source: Path) -> Tokenizer:
    """Bytes first, so that id 0 is `!`, and special tokens last, as Qwen's has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_texts(source), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKS])
    return tokenizer


def _texts(source: Path) -> Iterator[str]:
    for pattern in ("docs/**/*.md", "tests/entrypoints/**/*.py", "tests/tool_use/**/*.py"):
        for file in sorted(source.glob(pattern)):
            yield file.read_text(errors="replace")


def _save_tokenizer(directory: Path, tokenizer: Tokenizer, **changes: Any) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>", model_max_length=CONTEXT_TOKENS
    )
    for name, value in changes.items():
        setattr(fast, name, value)
    fast.save_pretrained(directory)
    return fast


def _save_chat(directory: Path, tokenizer: Tokenizer, template: str, source: Path) -> None:
    fast = _save_tokenizer(directory, tokenizer, chat_template=template)
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(fast), hidden_size=192, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=48, max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    teach(model, fast, source)
    model.generation_config.update(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)  # Qwen3's own
    model.eval().save_pretrained(directory)


def _with_ends(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that puts special tokens at both ends of a text, and between two texts."""
    copy = Tokenizer.from_str(tokenizer.to_str())
    first, last = _SPECIAL[1], END
    copy.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", pair=f"{first} $A {last} {last} $B {last}",
        special_tokens=[(text, copy.token_to_id(text)) for text in (first, last)],
    )  # fmt: skip
    return copy


def _encoder_config(fast: PreTrainedTokenizerFast, size: int, **changes: Any) -> Any:
    return AutoConfig.for_model(
        "bert", vocab_size=max(fast.get_vocab().values()) + 1,  # ids have gaps
        hidden_size=size, max_position_embeddings=512, type_vocab_size=2,
        initializer_range=0.3, pad_token_id=fast.pad_token_id, bos_token_id=None, eos_token_id=fast.eos_token_id,
        **(_ENCODER | changes),
    )  # fmt: skip


def _save_embed(directory: Path, tokenizer: Tokenizer, size: int, **changes: Any) -> None:
    fast = _save_tokenizer(directory, tokenizer, model_max_length=512, **changes)
    config = _encoder_config(fast, size, architectures=["BertModel"])
    AutoModel.from_config(config).eval().save_pretrained(directory)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": size, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


def _save_classifier(directory: Path, tokenizer: Tokenizer, labels: tuple[str, ...] | None, **changes: Any) -> None:
    """Save a model that classifies, or without labels one that is taught to rank."""
    fast = _save_tokenizer(directory, tokenizer, model_max_length=512, **changes)
    config = _encoder_config(fast, 64, num_labels=len(labels) if labels else 1)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    model = AutoModelForSequenceClassification.from_config(config)
    if not labels:
        teach_to_rank(model, fast)
    model.eval().save_pretrained(directory)


def _link(hub: Path, name: str, model: Path) -> None:
    """One model as huggingface_hub keeps it after a download."""
    folder = hub / f"models--{name.replace('/', '--')}"
    revision = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / revision).symlink_to(os.path.relpath(model, folder / "snapshots"))
