"""Train a small BERT that embeds, and save it as sentence-transformers does. Called by `e2e.demo_model`.

It learns to put a question, or one sentence, near the other text of the page that it comes from, and away from the
other pages in the batch (in-batch negatives: van den Oord et al., 2018). Fixed steps and seed, on one thread.
"""

import json
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from e2e.demo_model.corpus import NAMES, QUESTIONS, prose, topics

SEED = 20261125
VOCABULARY = 4096
DIMENSIONS = 128
TEXT_TOKENS_MAX = 64  # of the 512 positions it learns these, and the engine takes no longer text
PAIRS = 48  # per step, each of another page
STEPS = 300
LEARNING_RATE = 1e-3
QUESTION_SHARE = 0.5
TEMPERATURE = 0.07
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


def train(directory: Path, progress: Callable[[str], None]) -> None:
    """Leave a model directory (safetensors, tokenizer, sentence-transformers' files) in `directory`."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    pages = build_pages()
    tokenizer = _train_tokenizer(pages)
    tokenizer.save_pretrained(directory)
    model = BertModel(_shape(tokenizer), add_pooling_layer=False)
    parameters = sum(p.numel() for p in model.parameters())
    progress(f"{parameters / 1e6:.1f} M parameters, {len(pages)} pages, {STEPS} steps of {PAIRS} pairs")
    _learn(model, tokenizer, pages, progress)
    model.eval()
    model.save_pretrained(directory)
    _write_sentence_files(directory)
    for file in directory.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)  # pods read it as another user


def _train_tokenizer(pages: list[Page]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=list(_SPECIAL), show_progress=False)
    tokenizer.train_from_iterator((s for page in pages for s in page.sentences), trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", model_max_length=TEXT_TOKENS_MAX, **names
    )


def _shape(tokenizer: PreTrainedTokenizerFast) -> BertConfig:
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIMENSIONS,
        intermediate_size=4 * DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )


def _pair(page: Page) -> tuple[str, str]:
    """What is asked, and what should be near: a question or a sentence, and other sentences of its page."""
    first = random.randrange(len(page.sentences))
    around = page.sentences[max(0, first - 2) : first] + page.sentences[first + 1 : first + 3]
    if random.random() < QUESTION_SHARE:
        return random.choice(QUESTIONS).format(random.choice(page.names)), " ".join(page.sentences[first : first + 3])
    return page.sentences[first], " ".join(around)


def _learn(
    model: BertModel, tokenizer: PreTrainedTokenizerFast, pages: list[Page], progress: Callable[[str], None]
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate)
    targets = torch.arange(PAIRS)
    began = time.monotonic()
    for step in range(1, STEPS + 1):
        asked, near = zip(*(_pair(page) for page in random.sample(pages, PAIRS)), strict=True)
        similarity = _embed(model, tokenizer, asked) @ _embed(model, tokenizer, near).T / TEMPERATURE
        loss = (functional.cross_entropy(similarity, targets) + functional.cross_entropy(similarity.T, targets)) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % 50 == 0:
            progress(f"step {step}/{STEPS}, loss {loss.item():.2f}, {time.monotonic() - began:.0f} s")


def _embed(model: BertModel, tokenizer: PreTrainedTokenizerFast, texts: tuple[str, ...]) -> torch.Tensor:
    """(texts, DIMENSIONS), each of length 1: the mean over a text's tokens."""
    batch = tokenizer(list(texts), padding=True, truncation=True, max_length=TEXT_TOKENS_MAX, return_tensors="pt")
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def _learning_rate(step: int) -> float:
    """A short warm-up, then half a cosine down to a twentieth."""
    if step < 20:
        return (step + 1) / 20
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - 20) / (STEPS - 20))) / 2


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
