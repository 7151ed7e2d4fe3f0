"""llama-index' OpenAILike."""

import asyncio

from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

settings = {"model": MODEL, "api_base": URL, "api_key": "none", "context_window": 1024, "max_tokens": 20}
chat_model = OpenAILike(**settings, is_chat_model=True)
MESSAGES = [ChatMessage(role="system", content="Be short."), ChatMessage(role="user", content=QUESTION)]


def chat() -> None:
    assert chat_model.chat(MESSAGES).message.content


def stream_chat() -> None:
    *_, last = chat_model.stream_chat(MESSAGES)
    assert last.message.content


def complete() -> None:
    assert isinstance(OpenAILike(**settings, is_chat_model=False).complete("with open(").text, str)


def stream_complete() -> None:
    assert list(OpenAILike(**settings, is_chat_model=False).stream_complete("with open("))


def asynchronous() -> None:
    assert asyncio.run(chat_model.achat(MESSAGES)).message.content


def abort() -> None:
    pieces = chat_model.stream_chat(MESSAGES)
    next(pieces)
    pieces.close()
    assert chat_model.chat(MESSAGES).message.content


def retry() -> None:
    with overloaded_at_first() as url:
        retrying = OpenAILike(**settings | {"api_base": url}, is_chat_model=True, max_retries=1)
        assert retrying.chat(MESSAGES).message.content


run(chat, stream_chat, complete, stream_complete, asynchronous, abort, retry)
