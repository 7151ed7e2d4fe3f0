"""The embedding model that is trained here, as the engine serves it: what it finds."""

from pathlib import Path

import httpx
import pytest
from tests.engine.processes import EngineServer

from e2e.demo_model import EMBEDDING, demo_model_directory
from e2e.demo_model.bert import build_pages
from e2e.demo_model.corpus import NAMES, QUESTIONS

QUESTION = "how to use {}"  # in none of the forms that it was trained with
TEXT_CHARACTERS_MAX = 200


def embed(engine: EngineServer, texts: list[str]) -> list[list[float]]:
    answer: httpx.Response = engine.post("/v1/embeddings", {"model": EMBEDDING, "input": texts})
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def nearest(vector: list[float], others: list[list[float]]) -> int:
    """By the cosine: all vectors have length 1."""
    products = [sum(a * b for a, b in zip(vector, other, strict=True)) for other in others]
    return products.index(max(products))


@pytest.mark.slow  # trains for two minutes where the cache has no model
@pytest.mark.timeout(1800)
def test_a_question_finds_its_page(tmp_path: Path) -> None:
    assert QUESTION not in QUESTIONS
    pages = build_pages()
    queries = [number for number, page in enumerate(pages) if page.key in NAMES]
    with EngineServer(tmp_path, demo_model_directory(EMBEDDING), served_model_name=EMBEDDING) as engine:
        engine.wait_ready()
        beginnings = embed(engine, [" ".join(page.sentences[:3])[:TEXT_CHARACTERS_MAX] for page in pages])
        questions = embed(engine, [QUESTION.format(pages[number].names[0]) for number in queries])
    found = [nearest(vector, beginnings) for vector in questions]
    right = sum(one == other for one, other in zip(found, queries, strict=True))
    assert right >= 0.7 * len(queries), f"{right} of {len(queries)}, among {len(pages)} pages"
