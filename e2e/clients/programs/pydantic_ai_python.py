"""pydantic-ai: tools, and the three ways in which it asks for an output of a type."""

from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

PROVIDER = OpenAIProvider(base_url=URL, api_key="none")
CHAT, RESPONSES = OpenAIChatModel(MODEL, provider=PROVIDER), OpenAIResponsesModel(MODEL, provider=PROVIDER)
SETTINGS = ModelSettings(max_tokens=400)


class Count(BaseModel, extra="forbid"):
    """What is counted."""

    n: int = Field(ge=0, le=99)


def text() -> None:
    for model in (CHAT, RESPONSES):
        assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output


def stream() -> None:
    with Agent(CHAT, model_settings=SETTINGS).run_stream_sync(QUESTION) as answer:
        assert "".join(answer.stream_text(delta=True))


def tool_output() -> None:
    """The model is made to call the tool that is the output."""
    for model in (CHAT, RESPONSES):
        agent = Agent(model, output_type=ToolOutput(Count, name="count"), model_settings=SETTINGS)
        assert isinstance(agent.run_sync(QUESTION).output, Count)


def native_output() -> None:
    for model in (CHAT, RESPONSES):
        assert isinstance(
            Agent(model, output_type=NativeOutput(Count), model_settings=SETTINGS).run_sync(QUESTION).output, Count
        )


def prompted_output() -> None:
    """pydantic-ai puts the schema into the prompt and demands any object. The body demands one of the schema."""
    schema = {"name": "count", "schema": Count.model_json_schema()}
    body = {"response_format": {"type": "json_schema", "json_schema": schema}}
    agent = Agent(CHAT, output_type=PromptedOutput(Count), model_settings=SETTINGS | {"extra_body": body})
    assert isinstance(agent.run_sync(QUESTION).output, Count)


def tool() -> None:
    """Check a tool call, and then the output of a request that has the tool's result."""
    called: list[int] = []

    def weigh(n: int) -> str:
        """Weigh."""
        called.append(n)
        return f"weighed {n}"

    def choose(context: RunContext) -> ModelSettings:
        return ModelSettings(max_tokens=400, tool_choice=["weigh"] if context.run_step == 1 else ["count"])

    for model in (CHAT, RESPONSES):
        called.clear()
        agent = Agent(model, output_type=ToolOutput(Count, name="count"), tools=[weigh], model_settings=choose)
        assert isinstance(agent.run_sync(QUESTION).output, Count)
        assert len(called) == 1


def abort() -> None:
    agent = Agent(CHAT, model_settings=SETTINGS)
    with agent.run_stream_sync(QUESTION) as answer:
        next(iter(answer.stream_text(delta=True)))
    assert agent.run_sync(QUESTION).output


def retry() -> None:
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        with overloaded_at_first() as url:
            model = kind(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))
            assert Agent(model, model_settings=SETTINGS).run_sync(QUESTION).output


run(text, stream, tool_output, native_output, prompted_output, tool, abort, retry)
