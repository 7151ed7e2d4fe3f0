"""Train a small BERT that embeds, and save it as sentence-transformers does. Called by `e2e.demo_model`.

It learns to put a question, or one sentence, near the other text of the page that it comes from, and away from the
other pages in the batch (in-batch negatives: van den Oord et al., 2018).
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from transformers import BertModel, PreTrainedTokenizerFast

from e2e.demo_model.bert import (
    DIMENSIONS,
    TEXT_TOKENS_MAX,
    Page,
    build_config,
    build_pages,
    draw_question,
    learn,
    make_readable,
    save,
    start,
)

PAIRS = 48  # per step, each of another page
STEPS = 300
QUESTION_SHARE = 0.5
TEMPERATURE = 0.07


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer, sentence-transformers' files) in `directory`."""
    pages = build_pages()
    tokenizer = start(pages)
    model = BertModel(build_config(tokenizer), add_pooling_layer=False)
    learn([model], STEPS, lambda: _find_loss(model, tokenizer, pages), progress)
    save(model, tokenizer, directory)
    _write_sentence_files(directory)
    make_readable(directory)


def _pair(page: Page) -> tuple[str, str]:
    """What is asked, and what should be near: a question or a sentence, and other sentences of its page."""
    first = random.randrange(len(page.sentences))
    around = page.sentences[max(0, first - 2) : first] + page.sentences[first + 1 : first + 3]
    if random.random() < QUESTION_SHARE:
        return draw_question(page), " ".join(page.sentences[first : first + 3])
    return page.sentences[first], " ".join(around)


def _find_loss(model: BertModel, tokenizer: PreTrainedTokenizerFast, pages: list[Page]) -> torch.Tensor:
    targets = torch.arange(PAIRS)
    queries, near = zip(*(_pair(page) for page in random.sample(pages, PAIRS)), strict=True)
    similarity = _embed(model, tokenizer, queries) @ _embed(model, tokenizer, near).T / TEMPERATURE
    return (functional.cross_entropy(similarity, targets) + functional.cross_entropy(similarity.T, targets)) / 2


def _embed(model: BertModel, tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...]) -> torch.Tensor:
    """(texts, DIMENSIONS), each of length 1: the mean over a text's tokens."""
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=TEXT_TOKENS_MAX, return_tensors="pt")
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def _write_sentence_files(directory: Path) -> None:
    """What makes a model an embedding model: the mean over tokens, then length 1."""
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": DIMENSIONS, "pooling_mode_mean_tokens": True}
    limits = {"max_seq_length": TEXT_TOKENS_MAX, "do_lower_case": False}
    for file, content in (
        ("modules.json", modules), ("1_Pooling/config.json", pooling), ("sentence_bert_config.json", limits)
    ):  # fmt: skip
        path = directory / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=1))
