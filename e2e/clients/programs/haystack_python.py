"""Haystack's generator: a text, a stream, a tool loop, the same streamed, an error."""

import contextlib
import json

import openai
from checks import MODEL, URL, overloaded_at_first, run
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

ASKED = [ChatMessage.from_user("How is the weather in Paris?")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool(name="get_weather", description="The weather.", parameters=SCHEMA, function=lambda city: 21)


def build(model: str = MODEL, url: str = URL, max_retries: int = 0) -> OpenAIChatGenerator:
    key = Secret.from_token("none")
    return OpenAIChatGenerator(
        api_key=key, model=model, api_base_url=url, max_retries=max_retries, generation_kwargs={"max_tokens": 200}
    )


def text() -> None:
    (reply,) = build().run(ASKED)["replies"]
    assert reply.text == "Yes."
    assert reply.meta["usage"]["completion_tokens"] > 0


def stream() -> None:
    pieces: list[str] = []
    (reply,) = build().run(ASKED, streaming_callback=lambda chunk: pieces.append(chunk.content))["replies"]
    assert reply.text == "".join(pieces) == "Yes."


def loop(**fields: object) -> None:
    (first,) = build().run(ASKED, tools=[WEATHER], **fields)["replies"]
    (call,) = first.tool_calls
    assert (call.tool_name, call.arguments) == ("get_weather", {"city": "Paris"})
    result = ChatMessage.from_tool("21", origin=call)
    (last,) = build().run([*ASKED, first, result], tools=[WEATHER], **fields)["replies"]
    assert json.loads(last.text) == {"city": "Paris", "degrees": 21}


def tool_loop() -> None:
    loop()


def streamed_tool_loop() -> None:
    loop(streaming_callback=lambda chunk: None)


def abort() -> None:
    """Haystack has no abort, so the callback raises an error."""

    def leave(chunk: object) -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        build().run(ASKED, streaming_callback=leave)
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        (reply,) = build(url=url, max_retries=1).run(ASKED)["replies"]
    assert reply.text == "Yes."


def errors() -> None:
    try:
        build("no-such-model").run(ASKED)
    except openai.NotFoundError:
        return
    raise AssertionError("the model does not exist")


run(text, stream, tool_loop, streamed_tool_loop, abort, retry, errors)
