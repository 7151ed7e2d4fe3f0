"""litellm, with its providers `openai` and `hosted_vllm` for servers that speak OpenAI's API."""

import asyncio
import json

import litellm
from checks import MODEL, QUESTION, URL, overloaded_at_first, run

CALL = {"api_base": URL, "api_key": "none", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 20}

LONG = {"max_tokens": 200}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"]}


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


def tool() -> None:
    function = {"name": "count", "parameters": SCHEMA}
    chosen = {"type": "function", "function": {"name": "count"}}
    for provider in ("openai", "hosted_vllm"):
        tools = {"tools": [{"type": "function", "function": function}], "tool_choice": chosen}
        (call,) = litellm.completion(model=f"{provider}/{MODEL}", **CALL | LONG, **tools).choices[0].message.tool_calls
        assert isinstance(json.loads(call.function.arguments)["n"], int)


def schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/{MODEL}", **CALL | LONG, response_format=form)
        assert isinstance(json.loads(answer.choices[0].message.content)["n"], int)


def fallback() -> None:
    """The first model's answers are too long for the context, so the router asks the second one."""
    params = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
    models = [
        {"model_name": name, "litellm_params": params | {"max_tokens": tokens}}
        for name, tokens in (("long", 1_000_000), ("short", 5))
    ]
    router = litellm.Router(models, context_window_fallbacks=[{"long": ["short"]}], num_retries=0)
    assert asyncio.run(router.acompletion(model="long", messages=CALL["messages"])).usage.completion_tokens == 5


def anthropic_adapter() -> None:
    answer = asyncio.run(litellm.anthropic.messages.acreate(model=f"openai/{MODEL}", **CALL))
    assert answer["content"][0]["text"]


def abort() -> None:
    async def leave(provider: str) -> None:
        chunks = await litellm.acompletion(model=f"{provider}/{MODEL}", **CALL, stream=True)
        await anext(chunks)
        await chunks.aclose()

    for provider in ("openai", "hosted_vllm"):
        asyncio.run(leave(provider))
        assert litellm.completion(model=f"{provider}/{MODEL}", **CALL).choices


def retry() -> None:
    for provider in ("openai", "hosted_vllm"):
        with overloaded_at_first() as url:
            params = {"model": f"{provider}/{MODEL}", "api_base": url, "api_key": "none"}
            router = litellm.Router([{"model_name": "any", "litellm_params": params}], num_retries=1)
            assert asyncio.run(router.acompletion(model="any", messages=CALL["messages"], max_tokens=5)).choices


def errors() -> None:
    try:
        litellm.completion(model="openai/no-such", **CALL)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was served")


run(
    chat, stream, text_completion, router, cache_control, context_overflow, tool, schema, fallback, anthropic_adapter,
    abort, retry, errors,
)  # fmt: skip
