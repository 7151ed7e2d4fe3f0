"""litellm with a service that embeds, with litellm's providers `openai` and `hosted_vllm`."""

import asyncio

import litellm
from checks import MODEL, URL, run

CALL = {"api_base": URL, "api_key": "none", "input": ["open a file", "the with statement"]}


def embed() -> None:
    answers = [litellm.embedding(model=f"{provider}/{MODEL}", **CALL) for provider in ("openai", "hosted_vllm")]
    for answer in answers:
        assert len(answer.data) == 2
        assert answer.usage.prompt_tokens
        assert len(answer.data[0]["embedding"]) == len(answers[0].data[0]["embedding"]) > 1


def asynchronous() -> None:
    assert len(asyncio.run(litellm.aembedding(model=f"openai/{MODEL}", **CALL)).data) == 2


def errors() -> None:
    try:
        litellm.embedding(model="openai/no-such", **CALL)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was served")


run(embed, asynchronous, errors)
