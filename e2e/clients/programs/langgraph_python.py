"""LangGraph's graphs, and LangChain's tools and structured output, with ChatOpenAI."""

from typing import Annotated, TypedDict

from checks import MODEL, QUESTION, URL, run
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from pydantic import BaseModel, Field

chat_model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=400, max_retries=0)


class Count(BaseModel, extra="forbid"):
    """What is counted."""

    n: int = Field(ge=0, le=99)


@tool(args_schema=Count)
def count(n: int) -> str:
    """Count."""
    return f"counted {n}"


class State(TypedDict):
    """The messages so far."""

    messages: Annotated[list, add_messages]


def structured_output() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat_model.with_structured_output(Count, method=method).invoke(QUESTION), Count), method


def bound_tools() -> None:
    """Check a tool call that the request demands, whole and streamed."""
    bound = chat_model.bind_tools([count], tool_choice="count")
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "count"
    chunks = list(bound.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [each["name"] for each in whole.tool_calls] == ["count"]


def graph() -> None:
    """A model that must call a tool, the tool, and the model again with its result."""

    def call_model(state: State) -> State:
        done = isinstance(state["messages"][-1], ToolMessage)
        model = chat_model if done else chat_model.bind_tools([count], tool_choice="any", parallel_tool_calls=False)
        return {"messages": [model.invoke(state["messages"])]}

    steps = StateGraph(State)
    steps.add_node("ask", call_model)
    steps.add_node("tools", ToolNode([count]))
    steps.add_edge(START, "ask")
    steps.add_conditional_edges("ask", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    steps.add_edge("tools", "ask")
    messages = steps.compile().invoke({"messages": [("user", QUESTION)]})["messages"]
    assert [type(message) for message in messages[-2:]] == [ToolMessage, AIMessage]
    assert messages[-2].content.startswith("counted ")


def stream() -> None:
    steps = StateGraph(State)
    steps.add_node("ask", lambda state: {"messages": [chat_model.invoke(state["messages"])]})
    steps.add_edge(START, "ask")
    steps.add_edge("ask", END)
    given = {"messages": [("user", QUESTION)]}
    assert "".join(str(chunk.content) for chunk, _ in steps.compile().stream(given, stream_mode="messages"))


run(structured_output, bound_tools, graph, stream)
