"""Workloads rerank and classify: a BERT with a head, each beside a library that is used for such models.

rerank: four queries with 32 documents each, against `predict` of sentence-transformers' CrossEncoder, which sorts by
length and pads batches of 32. classify: texts, against transformers' pipeline with batches of 32.
"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, BertConfig, pipeline

from conveyor_bench.workloads import encoder
from conveyor_bench.workloads.encoder import (
    SHAPES,
    VOCABULARY,
    Job,
    Run,
    Vectors,
    random_texts,
    run_all,
    write_tokenizer,
)
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.serving.http.scores import activate
from conveyor_engine.wire.classification import Activation, encode_token_types

QUERIES, QUERY_WORDS = 4, (4, 16)
LABELS = 8
_SPECIAL_TOKENS = 3  # of a pair


def build_rerank() -> Job:
    """Return the job in which pairs of a query and a document become scores."""
    sizes = {"queries": QUERIES, "pairs": encoder.TEXTS, "tokens": encoder.TOKENS}
    return Job("scores", "sentence-transformers", draw_pairs, write_cross_encoder, open_ranker, open_predict, sizes)


def build_classify() -> Job:
    """Return the job in which texts become the scores of eight labels."""
    sizes = {"texts": encoder.TEXTS, "tokens": encoder.TOKENS, "labels": LABELS}
    return Job("probabilities", "transformers", random_texts, write_classifier, open_labeller, open_pipeline, sizes)


def draw_pairs(seed: int) -> list[tuple[str, str]]:
    """Return pairs of a query and a text of `embed`. Texts are cut so that a pair has at most 512 tokens."""
    random, texts = Random(seed), random_texts(seed)
    queries = []
    for _ in range(QUERIES):
        queries.append(" ".join(f"w{random.randrange(3, VOCABULARY)}" for _ in range(random.randint(*QUERY_WORDS))))
    pairs = []
    for number, text in enumerate(texts):
        query = queries[number % QUERIES]
        room = encoder.TOKENS[1] - len(query.split()) - _SPECIAL_TOKENS
        pairs.append((query, " ".join(text.split()[:room])))
    return pairs


def write_cross_encoder(folder: Path, shape: str) -> None:
    """Write a model with one label and random weights (seed 0). Its scores are sigmoids."""
    _write(folder, shape, 1)


def write_classifier(folder: Path, shape: str) -> None:
    """Write a model with random weights (seed 0)."""
    _write(folder, shape, LABELS)


def _write(folder: Path, shape: str, num_labels: int) -> None:
    torch.manual_seed(0)
    config = BertConfig(**SHAPES[shape], vocab_size=VOCABULARY, initializer_range=0.1, num_labels=num_labels)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)


def open_ranker(core: EngineCore, folder: Path) -> Run:
    return _open_engine(core, folder, "sigmoid")


def open_labeller(core: EngineCore, folder: Path) -> Run:
    return _open_engine(core, folder, "softmax")


def _open_engine(core: EngineCore, folder: Path, activation: Activation) -> Run:
    """Return a function that runs this engine with the model's tokenizer, from texts to scores."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def run(items: Sequence[str] | Sequence[tuple[str, str]]) -> Vectors:
        encodings = tokenizer.encode_batch_fast(list(items))
        logits = run_all(core, ((each.ids, encode_token_types(each.type_ids)) for each in encodings))
        return np.array([activate(row.tolist(), activation) for row in logits], np.float32)

    return run


def open_predict(folder: Path, dtype: str) -> Run:
    """Open sentence-transformers as its users do."""
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})

    def predict(pairs: Sequence[tuple[str, str]]) -> Vectors:
        scores = model.predict(list(pairs), batch_size=encoder.BATCH, show_progress_bar=False)
        return np.asarray(scores, np.float32)[:, None]

    return predict


def open_pipeline(folder: Path, dtype: str) -> Run:
    """Open transformers' pipeline as its users call it for many texts."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=getattr(torch, dtype))
    labels = [model.config.id2label[number] for number in range(model.config.num_labels)]
    classify = pipeline("text-classification", model=model, tokenizer=str(folder), device="cpu", top_k=None)

    def run(texts: Sequence[str]) -> Vectors:
        rows = []
        for labelled in classify(list(texts), batch_size=encoder.BATCH):
            scores = {one["label"]: one["score"] for one in labelled}
            rows.append([scores[label] for label in labels])
        return np.array(rows, np.float32)

    return run
