"""openai for Python."""

import asyncio

from checks import MODEL, QUESTION, URL, run
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]


def models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20, n=2, seed=1)
    assert len(answer.choices) == 2
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 40
    messages = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And then?"}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5).choices


def stream() -> None:
    options = {"include_usage": True}
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0, stream=True, stream_options=options
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens


def stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=10) as events:
        assert any(event.type == "content.done" for event in events)


def logprobs() -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)


def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt=["with open(", "for x in"], max_tokens=8, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1]


def many_at_once() -> None:
    async def send() -> list:
        async with AsyncOpenAI(base_url=URL, api_key="none") as many:
            calls = [many.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=10) for _ in range(8)]
            return await asyncio.gather(*calls)

    assert all(answer.choices[0].message.content for answer in asyncio.run(send()))


def errors() -> None:
    for wrong, kind in (({"model": "no-such"}, NotFoundError), ({"frequency_penalty": 2.5}, BadRequestError)):
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **wrong})
        except kind as error:
            named = error.param
        else:
            named = "nothing: it was accepted"
        assert named in wrong, named


run(models, chat, stream, stream_helper, logprobs, completions, many_at_once, errors)
