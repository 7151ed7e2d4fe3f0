"""Tests /v1/responses on a real server with a random model and OpenAI's client. The answers are those of chat."""

import json
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tests.engine.chat_model import CONTEXT_TOKENS
from tests.engine.serving.http.agents import AgentServer

SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "It.", "parameters": SCHEMA, "strict": True},
    {
        "type": "function",
        "name": "now",
        "parameters": {"type": "object", "additionalProperties": False},
        "strict": True,
    },
]
CALL = 'Look: <tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>\\n done'.replace("{", "[{]").replace(
    "}", "[}]"
)
CLIENTS = {
    *("model", "input", "instructions", "max_output_tokens", "tools", "tool_choice", "parallel_tool_calls", "text"),
    *("reasoning", "stream", "temperature", "store", "metadata", "extra_headers", "include", "previous_response_id"),
    *(
        "text_format",
        "conversation",
        "user",
        "background",
        "truncation",
        "top_logprobs",
        "service_tier",
        "max_tool_calls",
    ),
}  # the fields that the client knows; others are extensions


@pytest.fixture(scope="module")
def client(agent: AgentServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=agent.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def fields_of(**fields: Any) -> dict[str, Any]:
    known = {"model": "tiny", "input": "the fox", "max_output_tokens": 20, "seed": 0, **fields}
    more = {name: value for name, value in known.items() if name not in CLIENTS}
    return {name: value for name, value in known.items() if name in CLIENTS} | {"extra_body": more}


def send(client: OpenAI, **fields: Any) -> Any:
    return client.responses.create(**fields_of(**fields))


def send_streamed(client: OpenAI, **fields: Any) -> tuple[Response, list[Any]]:
    """Return the response that the client builds from the stream, and the events."""
    events = list(send(client, stream=True, **fields))
    with client.responses.stream(**fields_of(**fields)) as stream:
        return stream.until_done().get_final_response(), events


def chat(agent: AgentServer, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 20, **fields}
    response = agent.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_response_is_what_chat_answers(agent: AgentServer, client: OpenAI) -> None:
    response = send(client, temperature=0, ignore_eos=True, metadata={"a": "b"}, instructions="be kind")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the fox"}]
    same = chat(agent, messages=messages, temperature=0, ignore_eos=True)
    assert response.output_text == same["choices"][0]["message"]["content"]
    assert [item.type for item in response.output] == ["message"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    counts = same["usage"]
    assert (response.usage.input_tokens, response.usage.output_tokens) == (counts["prompt_tokens"], 20)
    assert (response.store, response.previous_response_id, response.metadata) == (False, None, {"a": "b"})
    assert (response.instructions, response.temperature, response.max_output_tokens) == ("be kind", 0, 20)
    assert (response.tools, response.tool_choice, response.parallel_tool_calls) == ([], "auto", True)
    assert response.id.startswith("resp_")


def test_an_answer_that_ends_by_itself_is_completed(client: OpenAI) -> None:
    response = send(client, stop_token_ids=list(range(128)), max_output_tokens=None, seed=1, store=None)
    assert (response.status, response.incomplete_details, response.output[0].status) == ("completed", None, "completed")
    assert response.completed_at >= response.created_at


def test_the_template_sees_what_it_would_see_of_a_chat(agent: AgentServer, client: OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "get_weather", "arguments": '{"city": "x"}'},
        {"type": "function_call", "id": "fc_2", "call_id": "2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sun"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "message", "role": "assistant", "content": "so"},
        {"type": "message", "role": "user", "content": "and?"},
    ]  # fmt: skip
    calls = [("1", "get_weather", '{"city": "x"}'), ("2", "now", "{}")]
    same = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [
            {"id": call, "function": {"name": name, "arguments": arguments}} for call, name, arguments in calls]},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
        {"role": "tool", "content": "noon", "tool_call_id": "2"},
        {"role": "assistant", "content": "so"},
        {"role": "user", "content": "and?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    body = {"temperature": 0, "ignore_eos": True}
    response = send(client, input=items, tools=TOOLS, **body)
    answer = chat(agent, messages=same, tools=tools, **body)
    assert response.usage.input_tokens == answer["usage"]["prompt_tokens"]
    assert response.output_text == answer["choices"][0]["message"]["content"]


ORDER = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
    *("response.output_item.done", "response.incomplete"),
]


def test_the_events_are_openais_in_their_order(agent: AgentServer) -> None:
    body = {"input": "the fox", "max_output_tokens": 5, "ignore_eos": True, "stream": True, "seed": 1}
    response = agent.post("/v1/responses", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = response.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    pairs = [event.split("\ndata: ") for event in events]
    data = [json.loads(text) for _, text in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [each["type"] for each in data]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    kinds = list(dict.fromkeys(each["type"] for each in data))
    assert kinds == ORDER
    adapter: Any = TypeAdapter(ResponseStreamEvent)
    for each in data:
        assert type(adapter.validate_python(each)).__name__.startswith("Response")
    final = data[-1]["response"]
    text = "".join(each["delta"] for each in data if each["type"] == "response.output_text.delta")
    assert final["output"][0]["content"][0]["text"] == text
    assert data[-2]["item"] == final["output"][0]
    assert data[0]["response"]["status"] == "in_progress"
    assert final["usage"]["output_tokens"] == 5


def untimed(response: Any) -> Any:
    """Return the response without fields that differ between answers."""
    document = response.to_dict()
    document.pop("parsed", None)
    items = [{name: value for name, value in item.items() if name not in ("id", "call_id", "parsed_arguments")}
             for item in document["output"]]  # fmt: skip
    for item in items:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return {**document, "output": items, "id": "", "created_at": 0, "completed_at": 0}


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a-z ]{20}", "max_output_tokens": 60},
        {"tools": TOOLS, "tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 400},
        {"tools": TOOLS, "guided_regex": CALL, "max_output_tokens": 400},
        {"guided_regex": "[a-z ]{20}", "max_output_tokens": 60, "chat_template_kwargs": {"enable_thinking": True},
         "thinking_token_budget": 7},
    ],
    ids=["text", "call", "text, call and text", "thinking"],
)  # fmt: skip
def test_a_stream_reports_the_same(client: OpenAI, fields: Any) -> None:
    whole = send(client, temperature=1, **{"seed": 3, **fields})
    streamed, events = send_streamed(client, temperature=1, **{"seed": 3, **fields})
    assert untimed(streamed) == untimed(whole) == untimed(events[-1].response)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [item.type for item in added] == [item.type for item in whole.output]


def test_calls_are_valid_and_their_results_come_back(client: OpenAI) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 400}
    for seed in range(3):
        response = send(client, temperature=1, seed=seed, **fields)
        (call,) = response.output
        assert (response.status, call.type, call.status) == ("completed", "function_call", "completed")
        jsonschema.validate(json.loads(call.arguments), {tool["name"]: tool["parameters"] for tool in TOOLS}[call.name])
    assert response.tool_choice == "required"
    assert [tool.name for tool in response.tools] == ["get_weather", "now"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "9"}
    history: Any = [{"role": "user", "content": "a"}, *response.output, result]
    assert send(client, input=history, tools=TOOLS, tool_choice="none").output


def test_text_and_calls_keep_their_order(client: OpenAI) -> None:
    """A grammar replaces a model that can call tools."""
    response = send(client, tools=TOOLS, guided_regex=CALL, max_output_tokens=400)
    text, call, after = response.output
    assert (text.content[0].text, call.name, call.arguments, after.content[0].text) == ("Look:", "now", "{}", "done")


class Weather(BaseModel):
    """The client makes a strict schema of this."""

    city: str
    days: int


def test_an_answer_follows_a_schema_and_the_client_parses_it(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "it", "schema": SCHEMA, "strict": True}}
    response = send(client, text=text, max_output_tokens=400, temperature=1, seed=1)
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text.format.type == "json_schema"
    assert response.text.format.schema_ == SCHEMA
    fields = fields_of(max_output_tokens=2000, temperature=1, seed=3)
    parsed = client.responses.parse(**fields, text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    plain = send(client, text={"format": {"type": "json_object"}}, max_output_tokens=2000, temperature=1, seed=5)
    assert plain.status == "incomplete" or isinstance(json.loads(plain.output_text), dict)


def test_thinking_is_an_item_of_its_own(agent: AgentServer, client: OpenAI) -> None:
    never = {"logit_bias": {str(agent.end): -100}, "ignore_eos": True, "seed": 3}  # but for the budget it would not end
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 7}
    response = send(client, max_output_tokens=60, include=["reasoning.encrypted_content"], **thinks, **never)
    reasoning, message = response.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text
    assert (reasoning.summary, reasoning.encrypted_content) == ([], None)
    assert response.usage.output_tokens_details.reasoning_tokens == 8, "and the mark"
    back: Any = [{"role": "user", "content": "a"}, *response.output, {"role": "user", "content": "b"}]
    bare = [item for item in back if item is not reasoning]
    assert send(client, input=back).usage.input_tokens > send(client, input=bare).usage.input_tokens
    effort: Any = {"reasoning": {"effort": "low", "summary": "auto"}}
    assert send(client, **effort).usage.input_tokens > send(client).usage.input_tokens
    assert send(client, **effort).reasoning.effort == "low"


LOGPROBS: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def test_text_has_the_log_probabilities_of_chat(agent: AgentServer, client: OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    expected = chat(agent, **fields, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    response = send(client, **fields, **LOGPROBS)
    assert [one.model_dump() for one in response.output[0].content[0].logprobs] == expected
    assert response.top_logprobs == 2
    events: list[Any] = list(send(client, **fields, **LOGPROBS, stream=True))
    streamed = events[-1].response
    found = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [one.model_dump() for one in found] == expected
    assert [one.model_dump() for one in streamed.output[0].content[0].logprobs] == expected
    assert send(client, **fields).output[0].content[0].logprobs == []


def test_thinking_and_calls_have_no_log_probabilities(agent: AgentServer, client: OpenAI) -> None:
    """The log probabilities of a text after thinking are only for the tokens of that text."""
    never = {"logit_bias": {str(agent.end): -100}, "ignore_eos": True, "seed": 3}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 7}
    for response in (
        send(client, max_output_tokens=60, **LOGPROBS, **thinks, **never),
        list(send(client, max_output_tokens=60, **LOGPROBS, **thinks, **never, stream=True))[-1].response,
    ):
        text = response.output[1].content[0]
        assert b"".join(bytes(one.bytes) for one in text.logprobs).decode(errors="replace").strip() == text.text.strip()
    called = send(client, guided_regex=CALL, tools=TOOLS, max_output_tokens=400, **LOGPROBS)
    messages = [item for item in called.output if item.type == "message"]
    for item in messages:
        spelled = b"".join(bytes(one.bytes) for one in item.content[0].logprobs).decode()
        assert item.content[0].text.strip() in spelled
        assert "tool_call" not in spelled.replace(item.content[0].text, "")


def test_a_format_of_the_text_is_none_of_a_demanded_call(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "it", "schema": {"type": "integer"}}}
    response = send(client, text=text, tools=TOOLS, tool_choice="required", max_output_tokens=400, seed=1)
    assert {item.type for item in response.output} == {"function_call"}
    jsonschema.validate(json.loads(response.output[0].arguments), SCHEMA | {"required": []})


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["message.output_text"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": CONTEXT_TOKENS}, "max_output_tokens"),
    ({"input": []}, "input"),
    ({"input": "a" * CONTEXT_TOKENS}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "thing"}}], "tool_choice": "required"},
     "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "none such"}}, "tool_choice"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"text": {"verbosity": "lowest"}}, "text.verbosity"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"model": "other"}, "model"),
    ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ({"user": "a" * 513}, "user"),
    ({"tools": [{"type": "function", "name": f"f{n}", "description": "a" * 100_000} for n in range(6)],
      "tool_choice": "none"}, "instructions"),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.NotFoundError if param == "model" else openai.BadRequestError) as raised:
        send(client, **fields, stream=stream)
    assert raised.value.param == param
    assert param.split("[")[0].split(".")[0] in raised.value.message or param == "input"


def test_a_stream_that_fails_ends_with_a_failed_response(client: OpenAI) -> None:
    late = {"X-Request-Timeout-Seconds": "3"}
    *_, last = send(client, max_output_tokens=8000, logit_bias={"0": -100}, extra_headers=late, stream=True)  # may end
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "time" in last.response.error.message


def test_nothing_is_held_for_a_client_that_leaves(agent: AgentServer, client: OpenAI) -> None:
    for _ in range(3):
        stream = send(client, max_output_tokens=8000, ignore_eos=True, stream=True)
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 60
    while any((load := agent.get("/load").json())[name] for name in ("running", "waiting", "kv_cache_usage")):
        assert time.monotonic() < deadline, load
        time.sleep(0.05)
