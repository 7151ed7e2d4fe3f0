"""openai for Python, with /v1/responses."""

import asyncio

from checks import MODEL, QUESTION, URL, overloaded_at_first, run
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=URL, api_key="none", max_retries=0)
CALL = {"model": MODEL, "input": QUESTION, "max_output_tokens": 30}
PARAMETERS = {
    "type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "name": "count", "description": "Counts.", "parameters": PARAMETERS, "strict": True}


def response() -> None:
    answer = client.responses.create(**CALL, instructions="Be brief.", metadata={"a": "b"})
    assert answer.output_text
    assert answer.usage.output_tokens <= 30
    assert (answer.store, answer.metadata) == (False, {"a": "b"})
    history = [{"role": "user", "content": QUESTION}, *answer.output, {"role": "user", "content": "And then?"}]
    assert client.responses.create(**{**CALL, "input": history}).usage.input_tokens > answer.usage.input_tokens


def stream() -> None:
    whole = client.responses.create(**CALL, temperature=0)
    events = list(client.responses.create(**CALL, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


class Count(BaseModel):
    """What is counted."""

    n: int


def parse_and_helper() -> None:
    fields = {**CALL, "max_output_tokens": 300, "text_format": Count}
    assert isinstance(client.responses.parse(**fields).output_parsed, Count)
    with client.responses.stream(**fields) as events:
        assert isinstance(events.until_done().get_final_response().output_parsed, Count)


def tools() -> None:
    fields = {**CALL, "tools": [TOOL], "max_output_tokens": 200}
    answer = client.responses.create(**fields, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "count")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "9"}
    history = [{"role": "user", "content": QUESTION}, call, result]
    assert client.responses.create(**{**fields, "input": history}, tool_choice="none").output_text


def many_at_once() -> None:
    async def send() -> list:
        async with AsyncOpenAI(base_url=URL, api_key="none") as many:
            return await asyncio.gather(*(many.responses.create(**CALL) for _ in range(8)))

    assert all(answer.output_text for answer in asyncio.run(send()))


def abort() -> None:
    with client.responses.create(**CALL, stream=True) as events:
        next(iter(events))
    assert client.responses.create(**CALL).output_text


def retry() -> None:
    with overloaded_at_first() as url:
        assert OpenAI(base_url=url, api_key="none", max_retries=1).responses.create(**CALL).output_text


def errors() -> None:
    for wrong, kind in (
        ({"model": "no-such"}, NotFoundError),
        ({"background": True}, BadRequestError),
        ({"previous_response_id": "resp_1"}, BadRequestError),
    ):
        try:
            client.responses.create(**{**CALL, **wrong})
        except kind as error:
            named = error.param
        else:
            named = "nothing: it was accepted"
        assert named in wrong, named


run(response, stream, parse_and_helper, tools, many_at_once, abort, retry, errors)
