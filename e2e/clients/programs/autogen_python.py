"""AutoGen's client and agent: a text, a stream, an agent that calls a tool, an error."""

import asyncio

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient
from checks import MODEL, URL, overloaded_at_first, run

INFO = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}  # fmt: skip
ASKED = [UserMessage(content="How is the weather in Paris?", source="user")]


def build(model: str = MODEL, url: str = URL, max_retries: int = 0) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=model, base_url=url, api_key="none", model_info=INFO, max_tokens=200, max_retries=max_retries
    )


def text() -> None:
    answer = asyncio.run(build().create(ASKED))
    assert answer.content == "Yes."
    assert answer.usage.completion_tokens > 0


def stream() -> None:
    async def read() -> list[object]:
        return [
            each
            async for each in build().create_stream(
                ASKED, extra_create_args={"stream_options": {"include_usage": True}}
            )
        ]

    *pieces, last = asyncio.run(read())
    assert "".join(map(str, pieces)) == last.content == "Yes."
    assert last.usage.completion_tokens > 0


def agent_with_a_tool() -> None:
    cities: list[str] = []

    async def get_weather(city: str) -> int:
        """The weather."""
        cities.append(city)
        return 21

    agent = AssistantAgent("a", build(), tools=[get_weather], reflect_on_tool_use=True)
    result = asyncio.run(agent.run(task="How is the weather in Paris?"))
    assert cities == ["Paris"]
    assert result.messages


def abort() -> None:
    async def leave() -> None:
        pieces = build().create_stream(ASKED)
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(leave())
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        assert asyncio.run(build(url=url, max_retries=1).create(ASKED)).content == "Yes."


def errors() -> None:
    try:
        asyncio.run(build("no-such-model").create(ASKED))
    except openai.NotFoundError:
        return
    raise AssertionError("the model does not exist")


run(text, stream, agent_with_a_tool, abort, retry, errors)
