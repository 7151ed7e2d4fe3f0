"""Semantic Kernel's service: a text, a stream, a function that is called, an error."""

import asyncio

from checks import MODEL, URL, overloaded_at_first, run
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import ServiceResponseException
from semantic_kernel.functions import kernel_function

CITIES: list[str] = []


class Weather:
    @kernel_function(name="get_weather", description="The weather.")
    def get_weather(self, city: str) -> str:
        CITIES.append(city)
        return "21"


def build(model: str = MODEL, url: str = URL, max_retries: int = 0) -> OpenAIChatCompletion:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries)
    return OpenAIChatCompletion(ai_model_id=model, async_client=client)


def ask() -> ChatHistory:
    history = ChatHistory()
    history.add_user_message("How is the weather in Paris?")
    return history


def settings(**fields: object) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(max_tokens=200, **fields)


def with_tool() -> tuple[Kernel, OpenAIChatPromptExecutionSettings]:
    kernel = Kernel()
    kernel.add_plugin(Weather(), "w")
    return kernel, settings(function_choice_behavior=FunctionChoiceBehavior.Auto())


def text() -> None:
    answer = asyncio.run(build().get_chat_message_content(ask(), settings()))
    assert str(answer) == "Yes."


def stream() -> None:
    async def read() -> str:
        return "".join([str(each) async for each in build().get_streaming_chat_message_content(ask(), settings())])

    assert asyncio.run(read()) == "Yes."


def tool_loop() -> None:
    kernel, chosen = with_tool()
    answer = asyncio.run(build().get_chat_message_content(ask(), chosen, kernel=kernel))
    assert CITIES == ["Paris"]
    assert "All three steps" in str(answer)


def abort() -> None:
    async def leave() -> None:
        pieces = build().get_streaming_chat_message_content(ask(), settings())
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(leave())
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        answer = asyncio.run(build(url=url, max_retries=1).get_chat_message_content(ask(), settings()))
    assert str(answer) == "Yes."


def errors() -> None:
    reason = ""
    try:
        asyncio.run(build("no-such-model").get_chat_message_content(ask(), settings()))
    except ServiceResponseException as error:
        reason = str(error.__cause__)
    assert "not served here" in reason, reason


run(text, stream, tool_loop, abort, retry, errors)
