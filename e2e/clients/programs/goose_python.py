"""goose's client for OpenAI's API, from goose's own package: a text, a stream, a tool loop, an abort, an error."""

import asyncio
import json

from checks import MODEL, URL, overloaded_at_first, run
from goose import (
    GooseError,
    MessageContent,
    MessageRole,
    Provider,
    ProviderMessage,
    ProviderModelConfig,
    ProviderTool,
    StreamChunk,
    openai_provider,
)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = ProviderTool(name="get_weather", description="The weather.", input_schema_json=json.dumps(SCHEMA))
ASKED = ProviderMessage(role=MessageRole.USER, content=[MessageContent.TEXT("How is the weather in Paris?")])


def build(url: str = URL) -> Provider:
    return openai_provider("none", url)


def settings(model: str = MODEL) -> ProviderModelConfig:
    return ProviderModelConfig(model_name=model, context_limit=100_000, max_tokens=200)


def ask(*messages: ProviderMessage, tools: tuple[ProviderTool, ...] = (), provider: Provider | None = None) -> list:
    answer = (provider or build()).complete(settings(), "Be brief.", [ASKED, *messages], list(tools))
    return asyncio.run(collect(answer)).content


async def collect(answer: object) -> object:
    return await answer


def text() -> None:
    assert [part.text for part in ask()] == ["Yes."]


async def read(*tools: ProviderTool) -> list[StreamChunk]:
    stream = await build().stream(settings(), "Be brief.", [ASKED], list(tools))
    chunks = []
    while chunk := await stream.next_chunk():
        chunks.append(chunk)
    return chunks


def stream_with_usage() -> None:
    *chunks, end = asyncio.run(read())
    assert "".join(chunk.text for chunk in chunks) == "Yes."
    assert end.usage.total_tokens > 0


def tool_loop() -> None:
    calls = ask(tools=(WEATHER,))
    (call,) = calls
    assert (call.name, json.loads(call.arguments_json)) == ("get_weather", {"city": "Paris"})
    result = MessageContent.TOOL_RESULT(call.id, True, json.dumps([{"type": "text", "text": "21"}]))
    messages = (
        ProviderMessage(role=MessageRole.ASSISTANT, content=calls),
        ProviderMessage(role=MessageRole.USER, content=[result]),
    )
    (last,) = ask(*messages, tools=(WEATHER,))
    assert json.loads(last.text) == {"city": "Paris", "degrees": 21}


def streamed_tool_call() -> None:
    (call,) = [chunk for chunk in asyncio.run(read(WEATHER)) if isinstance(chunk, StreamChunk.TOOL_CHUNK)]
    assert json.loads(call.arguments_json) == {"city": "Paris"}


def abort() -> None:
    async def leave() -> None:
        stream = await build().stream(settings(), "Be brief.", [ASKED], [])
        await stream.next_chunk()

    asyncio.run(leave())
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        assert [part.text for part in ask(provider=build(url))] == ["Yes."]


def errors() -> None:
    reason = ""
    try:
        asyncio.run(collect(build().complete(settings("no-such-model"), "", [ASKED], [])))
    except GooseError.Generic as error:
        reason = error.details
    assert "not served here" in reason, reason


run(text, stream_with_usage, tool_loop, streamed_tool_call, abort, retry, errors)
