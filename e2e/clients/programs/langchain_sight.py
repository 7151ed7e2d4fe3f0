"""langchain-openai's ChatOpenAI, with a service that reads images in chats."""

import asyncio

from checks import MODEL, SHAPES, URL, run
from langchain_core.messages import AIMessage, HumanMessage
from langchain_openai import ChatOpenAI

chat_model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", temperature=0, max_retries=0)
QUESTION = {"type": "text", "text": "What is this?"}
PICTURES = (  # LangChain's own block, and OpenAI's part
    {"type": "image", "base64": SHAPES, "mime_type": "image/png"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SHAPES}"}},
)
BOTH = "a red circle and a blue square"


def invoke() -> None:
    for picture in PICTURES:
        answer = chat_model.invoke([HumanMessage([picture, QUESTION])])
        assert answer.content == BOTH
        assert answer.usage_metadata["input_tokens"] > 16


def a_conversation() -> None:
    turns = [HumanMessage([PICTURES[0], QUESTION]), AIMessage(BOTH), HumanMessage("How many shapes are there?")]
    assert chat_model.invoke(turns).content == "two"


def stream() -> None:
    assert "".join(chunk.content for chunk in chat_model.stream([HumanMessage([PICTURES[0], QUESTION])])) == BOTH


def batch() -> None:
    asked = [[HumanMessage([picture, QUESTION])] for picture in PICTURES * 4]
    assert [answer.content for answer in chat_model.batch(asked)] == [BOTH] * 8


def asynchronous() -> None:
    assert asyncio.run(chat_model.ainvoke([HumanMessage([PICTURES[0], QUESTION])])).content == BOTH


run(invoke, a_conversation, stream, batch, asynchronous)
