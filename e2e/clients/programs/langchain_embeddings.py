"""langchain-openai's OpenAIEmbeddings.

By default, it tokenizes a text as OpenAI's models do and sends the token ids. The service has other tokens, so
`check_embedding_ctx_length` is False here.
"""

import asyncio
import math

from checks import MODEL, URL, run
from langchain_openai import OpenAIEmbeddings

TEXTS = ["open a file", "the with statement", "lists"]
model = OpenAIEmbeddings(
    model=MODEL, base_url=URL, api_key="none", check_embedding_ctx_length=False, chunk_size=256, max_retries=0
)


def query() -> None:
    assert math.isclose(math.hypot(*model.embed_query(TEXTS[0])), 1, rel_tol=1e-3)


def documents() -> None:
    vectors = model.embed_documents(TEXTS * 200)
    assert len(vectors) == 600
    assert math.isclose(math.dist(vectors[1], model.embed_query(TEXTS[1])), 0, abs_tol=1e-3)


def asynchronous() -> None:
    assert len(asyncio.run(model.aembed_documents(TEXTS))) == 3


run(query, documents, asynchronous)
