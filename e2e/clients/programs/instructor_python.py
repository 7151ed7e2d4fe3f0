"""instructor, in its modes TOOLS, TOOLS_STRICT, JSON_SCHEMA and MD_JSON."""

import asyncio

import instructor
from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 400, "max_retries": 0}
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)


class Count(BaseModel, extra="forbid"):
    """What is counted."""

    n: int = Field(ge=0, le=99)
    unit: str = Field(pattern="^[a-z]{1,8}$")


def connect(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=URL, api_key="none", max_retries=0), mode=mode)


def every_mode_of_schemas() -> None:
    for mode in MODES:
        assert isinstance(connect(mode).chat.completions.create(response_model=Count, **ASKED), Count), mode


def json() -> None:
    """In the mode MD_JSON, only the prompt has the schema, so the body repeats it for the grammar."""
    body = {"structured_outputs": {"json": Count.model_json_schema()}}
    client = connect(instructor.Mode.MD_JSON)
    assert isinstance(client.chat.completions.create(response_model=Count, extra_body=body, **ASKED), Count)


def partial() -> None:
    client = connect(instructor.Mode.JSON_SCHEMA)
    *_, last = client.chat.completions.create_partial(response_model=Count, **ASKED)
    assert Count.model_validate(last.model_dump())


def several() -> None:
    client = connect(instructor.Mode.JSON_SCHEMA)

    class Counts(BaseModel, extra="forbid"):
        """Two counts."""

        counts: list[Count] = Field(min_length=2, max_length=2)

    assert len(client.chat.completions.create(response_model=Counts, **ASKED).counts) == 2


def asynchronous() -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=URL, api_key="none"), mode=instructor.Mode.TOOLS)
    assert isinstance(asyncio.run(client.chat.completions.create(response_model=Count, **ASKED)), Count)


def retry() -> None:
    with overloaded_at_first() as url:
        client = instructor.from_openai(OpenAI(base_url=url, api_key="none", max_retries=1), mode=MODES[0])
        assert isinstance(client.chat.completions.create(response_model=Count, **ASKED), Count)


run(every_mode_of_schemas, json, partial, several, asynchronous, retry)
