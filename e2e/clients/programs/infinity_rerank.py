"""infinity_client with a service that ranks."""

import asyncio

from checks import MODEL, URL, run
from infinity_client import Client
from infinity_client.api.default import rerank
from infinity_client.models import RerankInput

QUERY = "How do I use dictionaries?"
DOCUMENTS = ["The assert statement", "A dictionary display is a series of key and value pairs."]


def rank() -> None:
    body = RerankInput(QUERY, DOCUMENTS, model=MODEL)
    results = rerank.sync(client=Client(base_url=URL), body=body).results
    assert [result.index for result in results] == [1, 0]
    assert results[0].relevance_score > results[1].relevance_score


def first_with_its_text() -> None:
    body = RerankInput(QUERY, DOCUMENTS, return_documents=True, model=MODEL, top_n=1)
    (result,) = asyncio.run(rerank.asyncio(client=Client(base_url=URL), body=body)).results
    assert DOCUMENTS[1] in str(result.document)


def errors() -> None:
    answer = rerank.sync_detailed(client=Client(base_url=URL), body=RerankInput(QUERY, DOCUMENTS, model="no-such"))
    assert answer.status_code == 404


run(rank, first_with_its_text, errors)
