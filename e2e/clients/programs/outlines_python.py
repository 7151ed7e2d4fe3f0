"""outlines, with the server as its model."""

from enum import Enum

import openai
import outlines
from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from pydantic import BaseModel, Field

vllm = outlines.from_vllm(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), MODEL)
server = outlines.from_openai(openai.OpenAI(base_url=URL, api_key="none", max_retries=0), MODEL)


class Count(BaseModel, extra="forbid"):
    """What is counted."""

    n: int = Field(ge=0, le=99)


class Unit(Enum):
    """A unit."""

    KILO = "kilo"
    MILE = "mile"


def text() -> None:
    assert vllm(QUESTION, max_tokens=20)


def stream() -> None:
    assert "".join(vllm.stream(QUESTION, max_tokens=20))


def schema() -> None:
    for model in (vllm, server):
        assert Count.model_validate_json(model(QUESTION, Count, max_tokens=400))


def regex() -> None:
    assert len(vllm(QUESTION, outlines.regex("[a-z]{7}"), max_tokens=40)) == 7


def choice() -> None:
    assert vllm(QUESTION, Unit, max_tokens=40) in ("kilo", "mile")


def grammar() -> None:
    assert vllm(QUESTION, outlines.cfg('start: "yes" | "no"'), max_tokens=40) in ("yes", "no")


def abort() -> None:
    pieces = vllm.stream(QUESTION, max_tokens=20)
    next(pieces)
    pieces.close()
    text()


def retry() -> None:
    with overloaded_at_first() as url:
        retrying = outlines.from_vllm(openai.OpenAI(base_url=url, api_key="none", max_retries=1), MODEL)
        assert retrying(QUESTION, max_tokens=20)


run(text, stream, schema, regex, choice, grammar, abort, retry)
