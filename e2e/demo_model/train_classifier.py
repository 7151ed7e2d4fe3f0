"""Train a small BERT that names the subject of a text, one of eight. Called by `e2e.demo_model`."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from e2e.demo_model.bert import TEXT_TOKENS_MAX, Page, build_config, build_pages, draw_question, learn, save, start
from e2e.demo_model.corpus import SUBJECTS

TEXTS = 48  # per step
STEPS = 120
QUESTION_SHARE = 0.4


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer) in `directory`."""
    pages = build_pages()
    tokenizer = start(pages)
    learned = [page for page in pages if page.key in SUBJECTS]
    labels = {number: SUBJECTS[page.key] for number, page in enumerate(learned)}
    config = build_config(tokenizer, id2label=labels, label2id={label: number for number, label in labels.items()})
    model = BertForSequenceClassification(config)
    learn([model], STEPS, lambda: _find_loss(model, tokenizer, learned), progress)
    save(model, tokenizer, directory)


def _find_loss(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, pages: list[Page]
) -> torch.Tensor:
    numbers = random.choices(range(len(pages)), k=TEXTS)
    texts = [_draw_text(pages[number]) for number in numbers]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=TEXT_TOKENS_MAX, return_tensors="pt")
    return functional.cross_entropy(model(**batch).logits, torch.tensor(numbers))


def _draw_text(page: Page) -> str:
    if random.random() < QUESTION_SHARE:
        return draw_question(page)
    return random.choice(page.sentences)
