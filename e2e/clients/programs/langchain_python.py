"""langchain-openai's ChatOpenAI and OpenAI."""

import asyncio

from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

chat_model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=20, max_retries=0)


def invoke() -> None:
    answer = chat_model.invoke([SystemMessage("Be short."), HumanMessage(QUESTION)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"]
    assert chat_model.invoke([HumanMessage(QUESTION), answer, HumanMessage("And then?")]).content is not None


def stream() -> None:
    assert "".join(chunk.content for chunk in chat_model.stream(QUESTION))


def batch() -> None:
    assert all(answer.content for answer in chat_model.batch([QUESTION] * 4))


def asynchronous() -> None:
    assert asyncio.run(chat_model.ainvoke(QUESTION)).content


def chain() -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be short."), ("user", "{question}")])
    assert (prompt | chat_model | StrOutputParser()).invoke({"question": QUESTION})


def completion() -> None:
    assert isinstance(OpenAI(model=MODEL, base_url=URL, api_key="none", max_tokens=8).invoke("with open("), str)


def abort() -> None:
    chunks = chat_model.stream(QUESTION)
    next(chunks)
    chunks.close()
    assert chat_model.invoke(QUESTION).content


def retry() -> None:
    with overloaded_at_first() as url:
        retrying = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_tokens=20, max_retries=1)
        assert retrying.invoke(QUESTION).content


run(invoke, stream, batch, asynchronous, chain, completion, abort, retry)
