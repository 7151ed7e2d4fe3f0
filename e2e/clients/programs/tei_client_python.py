"""tei-client, a client for text-embeddings-inference, with the paths of the model's task."""

import asyncio

from checks import MODEL, URL, run
from tei_client import HttpClient, ModelType

client = HttpClient(URL.removesuffix("/v1"))
TEXTS = ["open a file", "the with statement"]


def information() -> None:
    assert client.health()
    assert client.info().server_model_id == MODEL


def embed() -> None:
    first, second = client.embed(TEXTS)
    assert len(first) == len(second) > 1
    assert abs(sum(number**2 for number in first) - 1) < 1e-3
    assert len(asyncio.run(client.async_embed(TEXTS[0], truncate=True))) == 1


def rank() -> None:
    texts = ["The assert statement", "A dictionary display is a series of key and value pairs."]
    ranks = client.rerank("How do I use dictionaries?", texts, return_text=True).ranks
    assert [rank.index for rank in ranks] == [1, 0]
    assert ranks[0].text == texts[1]


def classify() -> None:
    one, two = client.classify([["How do I use dictionaries?"], ["An exception can be caught."]])
    assert max(one.scores, key=lambda each: each.score).label == "dictionaries"
    assert len(two.scores) == len(one.scores) > 1


def tokenize() -> None:
    (tokens,) = client.tokenize(TEXTS[0])
    assert tokens.tokens


own = {ModelType.Embedding: embed, ModelType.Reranker: rank, ModelType.Classifier: classify}[client.model_type]
run(information, own, tokenize)
