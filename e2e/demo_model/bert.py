"""What the small BERTs that are trained here have in common: pages, tokenizer, shape, schedule, and how one is saved.

Used by `train_encoder`, `train_reranker` and `train_classifier`. Fixed seed, on one thread.
"""

import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import BertConfig, PreTrainedModel, PreTrainedTokenizerFast

from e2e.demo_model.corpus import NAMES, QUESTIONS, prose, topics

SEED = 20261125
VOCABULARY = 4096
DIMENSIONS = 128
TEXT_TOKENS_MAX = 64  # of the 512 positions a model learns these
LEARNING_RATE = 1e-3
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class Page:
    """A page of the documentation: what it may be asked by, and its sentences."""

    key: str
    names: tuple[str, ...]
    sentences: tuple[str, ...]


def build_pages() -> list[Page]:
    """Each page that has enough to tell."""
    pages = []
    for key, text in sorted(topics.items()):
        sentences = tuple(s for p in prose(text) for s in re.split(r"(?<=[.!?]) +", p) if 20 <= len(s) <= 400)
        if len(sentences) >= 3:
            pages.append(Page(key, NAMES.get(key, (key.replace("-", " "),)), sentences))
    return pages


def start(pages: list[Page]) -> PreTrainedTokenizerFast:
    """Seeds all that is random, and trains the tokenizer."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator((s for page in pages for s in page.sentences), trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token="[MASK]",
        model_max_length=TEXT_TOKENS_MAX,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, **more: object) -> BertConfig:
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIMENSIONS,
        intermediate_size=4 * DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


def draw_question(page: Page) -> str:
    """One that asks for the page."""
    return random.choice(QUESTIONS).format(random.choice(page.names))


def learn(
    parts: list[nn.Module], num_steps: int, find_loss: Callable[[], torch.Tensor], progress: Callable[[str], None]
) -> None:
    """Takes the steps; each has a batch of its own, which `find_loss` draws."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    progress(f"{sum(p.numel() for p in parameters) / 1e6:.1f} M parameters, {num_steps} steps")
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _find_rate(step, num_steps))
    began = time.monotonic()
    for step in range(1, num_steps + 1):
        loss = find_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % 50 == 0:
            progress(f"step {step}/{num_steps}, loss {loss.item():.2f}, {time.monotonic() - began:.0f} s")


def _find_rate(step: int, num_steps: int) -> float:
    """A short warm-up, then half a cosine down to a twentieth."""
    if step < 20:
        return (step + 1) / 20
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - 20) / (num_steps - 20))) / 2


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Leaves a model directory that pods, which are another user, can read."""
    tokenizer.save_pretrained(directory)
    model.eval()
    model.save_pretrained(directory)
    make_readable(directory)


def make_readable(directory: Path) -> None:
    for file in directory.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
