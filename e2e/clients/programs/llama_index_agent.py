"""llama-index: structured predictions, and an agent with a tool, over OpenAILike."""

import asyncio

from checks import MODEL, QUESTION, URL, run
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

llm = OpenAILike(
    model=MODEL, api_base=URL, api_key="none", is_chat_model=True, is_function_calling_model=True, max_tokens=400,
    max_retries=0,
)  # fmt: skip
called: list[int] = []


class Count(BaseModel, extra="forbid"):
    """What is counted."""

    n: int = Field(ge=0, le=99)


def count(n: int) -> str:
    """Count."""
    called.append(n)
    return f"counted {n}"


TOOL = FunctionTool.from_defaults(count, fn_schema=Count, return_direct=True)


def prediction() -> None:
    assert isinstance(llm.structured_predict(Count, PromptTemplate(QUESTION)), Count)


def call() -> None:
    answer = llm.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    assert [each.tool_name for each in llm.get_tool_calls_from_response(answer)] == ["count"]


def agent() -> None:
    """The agent's model must call the tool, whose result is the agent's answer."""

    async def send() -> tuple[list[str], str]:
        workflow = AgentWorkflow([FunctionAgent(tools=[TOOL], llm=llm, initial_tool_choice="count")])
        handler = workflow.run(user_msg=QUESTION)
        tools = [event.tool_name async for event in handler.stream_events() if isinstance(event, ToolCallResult)]
        return tools, str(await handler)

    called.clear()
    tools, final = asyncio.run(send())
    assert tools == ["count"]
    assert final == f"counted {called[0]}"


def result() -> None:
    """A tool's call and its result are part of the next request."""
    answer = llm.chat_with_tools([TOOL], user_msg=QUESTION, tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    message = ChatMessage(role="tool", content="counted", additional_kwargs={"tool_call_id": call.tool_id})
    history = [ChatMessage(role="user", content=QUESTION), answer.message, message]
    assert llm.chat(history, max_tokens=20).message.content


run(prediction, call, agent, result)
