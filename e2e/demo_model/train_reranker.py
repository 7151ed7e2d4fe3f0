"""Train a small BERT that ranks: a cross-encoder, as sentence-transformers' CrossEncoder. Called by `e2e.demo_model`.

It reads a question and a text together, and says whether the text is about what the question asks for. From scratch it
would need far more texts to find out that the two have subjects, so it also learns to name both of them, by a layer
that is thrown away.
"""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from e2e.demo_model.bert import (
    DIMENSIONS,
    TEXT_TOKENS_MAX,
    Page,
    build_config,
    build_pages,
    draw_question,
    learn,
    save,
    start,
)
from e2e.demo_model.corpus import SUBJECTS

PAIRS = 48  # per step; half of them fit
STEPS = 300


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer) in `directory`."""
    pages = build_pages()
    tokenizer = start(pages)
    learned = [page for page in pages if page.key in SUBJECTS]
    model = BertForSequenceClassification(build_config(tokenizer, num_labels=1))
    namer = nn.Linear(DIMENSIONS, 2 * len(learned))
    learn([model, namer], STEPS, lambda: _find_loss(model, namer, tokenizer, learned), progress)
    save(model, tokenizer, directory)


def _find_loss(
    model: BertForSequenceClassification, namer: nn.Linear, tokenizer: PreTrainedTokenizerFast, pages: list[Page]
) -> torch.Tensor:
    rows = random.choices(range(len(pages)), k=PAIRS)
    documents = [number if random.random() < 0.5 else random.randrange(len(pages)) for number in rows]
    questions = [draw_question(pages[number]) for number in rows]
    texts = [random.choice(pages[number].sentences) for number in documents]
    batch = tokenizer(questions, texts, padding=True, truncation=True, max_length=TEXT_TOKENS_MAX, return_tensors="pt")
    output = model(**batch, output_hidden_states=True)
    fits = torch.tensor([float(one == other) for one, other in zip(rows, documents, strict=True)])
    loss = functional.binary_cross_entropy_with_logits(output.logits[:, 0], fits)
    named = namer(output.hidden_states[-1][:, 0]).chunk(2, dim=1)
    for logits, numbers in zip(named, (rows, documents), strict=True):
        loss = loss + functional.cross_entropy(logits, torch.tensor(numbers))
    return loss
