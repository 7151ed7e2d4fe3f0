"""openai for Python, with a service that embeds."""

import asyncio
import math

from checks import MODEL, URL, run
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
TEXTS = ["open a file", "the with statement", "lists"]


def embed(given: object, **options: object) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model=MODEL, input=given, **options).data]


def near(one: list[float], other: list[float]) -> bool:
    return all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(one, other, strict=True))


def one_text() -> None:
    (vector,) = embed(TEXTS[0])
    assert math.isclose(math.hypot(*vector), 1, rel_tol=1e-3)


def several() -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    for text, item in zip(TEXTS, answer.data, strict=True):
        assert near(embed(text)[0], item.embedding)


def token_ids() -> None:
    assert near(embed([5, 6, 7])[0], embed([[5, 6, 7], [8]])[0])


def encodings() -> None:
    """Check the encodings. By default, the client requests base64."""
    assert near(embed(TEXTS[0])[0], embed(TEXTS[0], encoding_format="float")[0])


def many_at_once() -> None:
    async def send() -> list:
        async with AsyncOpenAI(base_url=URL, api_key="none") as many:
            return await asyncio.gather(*(many.embeddings.create(model=MODEL, input=TEXTS) for _ in range(8)))

    assert all(len(answer.data) == 3 for answer in asyncio.run(send()))


def errors() -> None:
    for wrong, kind in (({"model": "no-such"}, NotFoundError), ({"input": []}, BadRequestError)):
        try:
            client.embeddings.create(**{"model": MODEL, "input": TEXTS, **wrong})
        except kind as error:
            named = error.param
        else:
            named = "nothing: it was accepted"
        assert named in wrong, named


run(one_text, several, token_ids, encodings, many_at_once, errors)
