"""litellm, with its provider for servers that speak OpenAI's API, and the one that is called after vLLM."""

import asyncio

import litellm
from checks import MODEL, QUESTION, URL, run

CALL = {"api_base": URL, "api_key": "none", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}


def chat() -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/{MODEL}", **CALL)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens


def stream() -> None:
    for provider in ("openai", "hosted_vllm"):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(model=f"{provider}/{MODEL}", **CALL, **options))
        assert litellm.stream_chunk_builder(chunks).choices[0].message.content


def text_completion() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="with open(", api_base=URL, api_key="none", max_tokens=8
    )
    assert answer.choices[0].finish_reason


def router() -> None:
    entry = {"model_name": "any", "litellm_params": {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}}
    answer = asyncio.run(litellm.Router([entry]).acompletion(model="any", messages=CALL["messages"], max_tokens=5))
    assert answer.choices


def cache_control() -> None:
    part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}]
    for provider in ("openai", "hosted_vllm"):
        assert litellm.completion(model=f"{provider}/{MODEL}", **CALL | {"messages": messages}).choices


def context_overflow() -> None:
    for provider in ("openai", "hosted_vllm"):
        for changes in ({"max_tokens": 1_000_000}, {"messages": [{"role": "user", "content": "word " * 100_000}]}):
            try:
                litellm.completion(model=f"{provider}/{MODEL}", **CALL | changes)
            except litellm.ContextWindowExceededError:
                continue
            raise AssertionError("litellm does not see that the context is too short")


def errors() -> None:
    try:
        litellm.completion(model="openai/no-such", **CALL)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was served")


run(chat, stream, text_completion, router, cache_control, context_overflow, errors)
