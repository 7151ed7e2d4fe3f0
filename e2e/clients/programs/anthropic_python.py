"""Anthropic's client for Python, with /v1/messages."""

import asyncio

from anthropic import Anthropic, AsyncAnthropic, BadRequestError, NotFoundError
from checks import MODEL, QUESTION, URL, overloaded_at_first, run

BASE = URL.removesuffix("/v1")  # the client adds it
client = Anthropic(base_url=BASE, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
TOOL = {"name": "count", "description": "Counts.", "input_schema": {**SCHEMA, "additionalProperties": False}}
CALL = {"model": MODEL, "messages": MESSAGES, "max_tokens": 30}


def message() -> None:
    answer = client.messages.create(**CALL, system="Be brief.", stop_sequences=["zzzz"])
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 30
    history = [*MESSAGES, {"role": "assistant", "content": answer.content}, *MESSAGES]
    assert client.messages.create(**{**CALL, "messages": history}).usage.input_tokens > answer.usage.input_tokens


def stream() -> None:
    greedy = {"extra_body": {"temperature": 0}}
    whole = client.messages.create(**CALL, **greedy)
    with client.messages.stream(**CALL, **greedy) as events:
        assert "".join(events.text_stream) == whole.content[0].text
        final = events.get_final_message()
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)


def tools() -> None:
    choice = {"type": "tool", "name": "count"}
    fields = {**CALL, "tools": [TOOL], "max_tokens": 200}
    answer = client.messages.create(**fields, tool_choice=choice)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use"
    assert isinstance(call.input["n"], int)
    with client.messages.stream(**fields, tool_choice=choice) as events:
        assert isinstance(events.get_final_message().content[0].input["n"], int)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "9"}
    history = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**fields, "messages": history}, tool_choice={"type": "none"}).content


def schema() -> None:
    fields = {**CALL, "max_tokens": 200, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    assert '"n"' in client.messages.create(**fields).content[0].text


def count_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
    assert counted.input_tokens == client.messages.create(**CALL).usage.input_tokens


def many_at_once() -> None:
    async def send() -> list:
        async with AsyncAnthropic(base_url=BASE, api_key="none") as many:
            return await asyncio.gather(*(many.messages.create(**CALL) for _ in range(8)))

    assert all(answer.content[0].text for answer in asyncio.run(send()))


def abort() -> None:
    with client.messages.create(**CALL, stream=True) as events:
        next(iter(events))
    assert client.messages.create(**CALL).content


def retry() -> None:
    with overloaded_at_first() as url:
        retrying = Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=1)
        assert retrying.messages.create(**CALL).content


def errors() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    for wrong, kind, word in (
        ({"model": "no-such"}, NotFoundError, "not_found_error"),
        ({"messages": [{"role": "user", "content": [image]}]}, BadRequestError, "invalid_request_error"),
    ):
        try:
            client.messages.create(**{**CALL, **wrong})
        except kind as error:
            named = error.body["error"]["type"]
        else:
            named = "nothing: it was accepted"
        assert named == word, named


run(message, stream, tools, schema, count_tokens, many_at_once, abort, retry, errors)
