"""openai-agents, with its default model class, which calls /v1/responses."""

import asyncio

from agents import Agent, ModelSettings, RunConfig, Runner, function_tool, set_tracing_disabled
from agents.models.openai_responses import OpenAIResponsesModel
from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)  # the traces would go to OpenAI
CONFIG = RunConfig(tracing_disabled=True)
# openai-agents raises an error for an answer that is cut off. With a grammar, every answer ends.
ENDS = ModelSettings(max_tokens=100, extra_body={"guided_regex": "[a-z ]{20}"})
called: list[int] = []


class Count(BaseModel):
    """What is counted."""

    n: int


@function_tool
def count(n: int) -> str:
    """Counts."""
    called.append(n)
    return f"counted {n}"


def connect(url: str, max_retries: int) -> OpenAIResponsesModel:
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries)
    return OpenAIResponsesModel(model=MODEL, openai_client=client)


def build(**fields: object) -> Agent:
    model = fields.pop("model", None) or connect(URL, 0)
    settings = fields.pop("model_settings", ModelSettings(max_tokens=200))
    return Agent(name="a", instructions="Be brief.", model=model, model_settings=settings, **fields)


def answer() -> None:
    assert asyncio.run(Runner.run(build(model_settings=ENDS), QUESTION, run_config=CONFIG)).final_output


def stream() -> None:
    async def send() -> tuple[list[str], str]:
        result = Runner.run_streamed(build(model_settings=ENDS), QUESTION, run_config=CONFIG)
        kinds = [event.data.type async for event in result.stream_events() if event.type == "raw_response_event"]
        return kinds, result.final_output

    kinds, final = asyncio.run(send())
    assert "response.output_text.delta" in kinds
    assert final


def output_type() -> None:
    result = asyncio.run(Runner.run(build(output_type=Count), QUESTION, run_config=CONFIG))
    assert isinstance(result.final_output, Count)


def tool() -> None:
    """Check the call, its result, and a later answer that uses both."""
    settings = ModelSettings(max_tokens=200, tool_choice="count", parallel_tool_calls=False)
    agent = build(tools=[count], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    result = asyncio.run(Runner.run(agent, QUESTION, run_config=CONFIG))
    assert called
    assert result.final_output == f"counted {called[-1]}"
    again = asyncio.run(Runner.run(build(model_settings=ENDS), result.to_input_list(), run_config=CONFIG))
    assert again.final_output


def abort() -> None:
    async def leave() -> None:
        result = Runner.run_streamed(build(model_settings=ENDS), QUESTION, run_config=CONFIG)
        async for _ in result.stream_events():
            result.cancel()

    asyncio.run(leave())
    answer()


def retry() -> None:
    with overloaded_at_first() as url:
        agent = build(model=connect(url, 1), model_settings=ENDS)
        assert asyncio.run(Runner.run(agent, QUESTION, run_config=CONFIG)).final_output


run(answer, stream, output_type, tool, abort, retry)
