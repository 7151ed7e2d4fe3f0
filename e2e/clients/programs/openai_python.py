"""openai for Python."""

import asyncio

from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]


class Count(BaseModel, extra="forbid"):
    """What is counted."""

    n: int = Field(ge=0, le=99)


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


def tool() -> None:
    """Check a call that the request demands, and an answer to its result."""
    fields = {"model": MODEL, "tools": [pydantic_function_tool(Count, name="count")], "max_tokens": 200}
    answer = client.chat.completions.parse(
        messages=MESSAGES, tool_choice="required", parallel_tool_calls=False, **fields
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Count)
    result = {"role": "tool", "tool_call_id": call.id, "content": "9"}
    assert client.chat.completions.create(messages=[*MESSAGES, message, result], tool_choice="none", **fields).choices


def schema() -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "response_format": Count}
    assert isinstance(client.chat.completions.parse(**fields).choices[0].message.parsed, Count)


def abort() -> None:
    fields = {"model": MODEL, "messages": MESSAGES}
    with client.chat.completions.create(**fields, max_tokens=400, stream=True) as chunks:
        next(iter(chunks))
    assert client.chat.completions.create(**fields, max_tokens=5).choices


def retry() -> None:
    with overloaded_at_first() as url:
        retrying = OpenAI(base_url=url, api_key="none", max_retries=1)
        assert retrying.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5).choices


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


run(models, chat, stream, stream_helper, logprobs, completions, tool, schema, many_at_once, abort, retry, errors)
