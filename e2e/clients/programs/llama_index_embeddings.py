"""llama-index' OpenAILikeEmbedding."""

import asyncio
import math

from checks import MODEL, URL, run
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

TEXTS = ["open a file", "the with statement", "lists"]
model = OpenAILikeEmbedding(model_name=MODEL, api_base=URL, api_key="none", embed_batch_size=64, max_retries=0)


def query() -> None:
    assert math.isclose(math.hypot(*model.get_query_embedding(TEXTS[0])), 1, rel_tol=1e-3)


def text() -> None:
    assert math.isclose(
        math.dist(model.get_text_embedding(TEXTS[1]), model.get_query_embedding(TEXTS[1])), 0, abs_tol=1e-3
    )


def batch() -> None:
    assert len(model.get_text_embedding_batch(TEXTS * 50)) == 150


def asynchronous() -> None:
    assert len(asyncio.run(model.aget_text_embedding_batch(TEXTS))) == 3


run(query, text, batch, asynchronous)
