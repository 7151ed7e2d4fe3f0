"""infinity_client with a service that embeds."""

import asyncio

from checks import MODEL, URL, run
from infinity_client import Client
from infinity_client.api.default import embeddings, health
from infinity_client.models import OpenAIEmbeddingInputText

TEXTS = ["open a file", "the with statement"]


def is_healthy() -> None:
    assert health.sync(client=Client(base_url=URL)) is not None


def embed() -> None:
    for inputs in (TEXTS[0], TEXTS):
        answer = embeddings.sync(client=Client(base_url=URL), body=OpenAIEmbeddingInputText(inputs, MODEL))
        assert len(answer.data) == (1 if isinstance(inputs, str) else 2)
        assert len(answer.data[0].embedding) > 1
        assert answer.usage.prompt_tokens > 0


def asynchronous() -> None:
    body = OpenAIEmbeddingInputText(TEXTS, MODEL)
    assert len(asyncio.run(embeddings.asyncio(client=Client(base_url=URL), body=body)).data) == 2


def errors() -> None:
    answer = embeddings.sync_detailed(client=Client(base_url=URL), body=OpenAIEmbeddingInputText(TEXTS, "no-such"))
    assert answer.status_code == 404
    assert b"no-such" in answer.content


run(is_healthy, embed, asynchronous, errors)
