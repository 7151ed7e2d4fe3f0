"""Tests custom tools and namespaces on a real server with a random model and OpenAI's client.

Also an answer that may be a call or follow a schema.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from tests.engine.serving.http.agents import AgentServer
from tests.engine.serving.http.test_hostile_grammars import build_and

PATTERN = "[ab]{3}-[cd]{2}"
SYNTAX = {"syntax": "regex", "definition": PATTERN}
CUSTOM: Any = {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "grammar", **SYNTAX}}
SPAWN: Any = {"type": "function", "name": "spawn", "parameters": {"type": "object", "additionalProperties": False}}
NAMESPACE: Any = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [SPAWN, CUSTOM]}
SCHEMA: Any = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
MATH = """start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""  # of OpenAI's guide to function calling
BEGINS_AS_MATH = r"\d+( [+*] \d+)*( ([+*] ?)?)?"
DEEP = f'start: {"(" * 129}"a"{")" * 129}'
AT_ONCE: Any = {"extra_body": {"thinking_token_budget": 0}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(agent: AgentServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=agent.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


def respond(client: OpenAI, **fields: Any) -> Any:
    tools = [{"type": "web_search"}, CUSTOM, NAMESPACE]
    return client.responses.create(
        model="tiny", input="the fox", tools=tools, max_output_tokens=200, **fields, **AT_ONCE
    )


@pytest.mark.parametrize("namespace", [None, "agents"])
def test_a_custom_tool_gets_a_text_whole_and_streamed(client: OpenAI, namespace: str | None) -> None:
    custom = CUSTOM if namespace is None else NAMESPACE
    fields: Any = {"tools": [custom], "tool_choice": {"type": "custom", "name": "patch"}, "input": "the fox", **AT_ONCE}
    (whole,) = client.responses.create(model="tiny", temperature=0, **fields).output
    assert (whole.type, whole.name, whole.namespace) == ("custom_tool_call", "patch", namespace)
    assert re.fullmatch(PATTERN, whole.input)
    with client.responses.stream(model="tiny", temperature=0, **fields) as stream:
        events = list(stream)
        (item,) = stream.get_final_response().output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", whole.input)  # type: ignore[union-attr]
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    (done,) = [each.input for each in events if each.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done == whole.input


def build_lark(definition: str) -> Any:
    return {**CUSTOM, "format": {"type": "grammar", "syntax": "lark", "definition": definition}}


@pytest.mark.parametrize("seed", range(3))
def test_an_input_follows_a_grammar_in_lark_whole_and_streamed(client: OpenAI, seed: int) -> None:
    tools = [build_lark(MATH), SPAWN]
    extra: Any = {"extra_body": {"thinking_token_budget": 0, "seed": seed}}
    fields: Any = {"model": "tiny", "tools": tools, "input": "the fox", "temperature": 1, "max_output_tokens": 40}
    choice: Any = {"type": "custom", "name": "patch"}
    (whole,) = client.responses.create(**fields, tool_choice=choice, **extra).output
    assert (whole.type, whole.name) == ("custom_tool_call", "patch")
    assert re.fullmatch(BEGINS_AS_MATH, whole.input)
    with client.responses.stream(**fields, tool_choice=choice, **extra) as stream:
        deltas = [each.delta for each in stream if each.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == whole.input


@pytest.mark.parametrize("definition", ["start: missing", "start: /(?=a)a/", DEEP, build_and(29)])
def test_a_grammar_in_lark_that_cannot_be_followed_is_refused_by_name(agent: AgentServer, definition: str) -> None:
    body = {"input": "the fox", "tools": [build_lark(definition)], "max_output_tokens": 2}
    answer = agent.post("/v1/responses", body | {"tool_choice": "required"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith("tools[0].format cannot be followed: ")
    assert agent.post("/v1/responses", body).status_code == 200, "a model that may choose only sees the grammar"


def test_a_costly_grammar_in_lark_ends_its_own_request_alone(agent: AgentServer) -> None:
    body = {"input": "the fox", "tools": [build_lark(build_and(17))], "tool_choice": "required"}
    answer = agent.post("/v1/responses", body | {"max_output_tokens": 20})
    assert answer.status_code in (200, 400), answer.text
    plain = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2}
    assert agent.post("/v1/chat/completions", plain).status_code == 200


def test_a_namespace_s_function_is_called_by_its_own_name(client: OpenAI) -> None:
    answer = respond(client, tool_choice={"type": "function", "name": "spawn"})
    (call,) = answer.output
    assert (call.type, call.name, call.namespace) == ("function_call", "spawn", "agents")
    assert json.loads(call.arguments) == {}
    assert [tool.type for tool in answer.tools] == ["web_search", "custom", "namespace"]
    items = [{"role": "user", "content": "the fox"}, call.model_dump(exclude_none=True)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    again = client.responses.create(model="tiny", input=[*items, result], tools=[NAMESPACE], max_output_tokens=5)
    assert again.status in ("completed", "incomplete")


def test_chat_has_custom_tools_too(agent: AgentServer, client: OpenAI) -> None:
    tools: Any = [{"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": SYNTAX}}}]
    choice: Any = {"type": "custom", "custom": {"name": "patch"}}
    messages: Any = [{"role": "user", "content": "the fox"}]
    fields: Any = {
        "model": "tiny",
        "tools": tools,
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
        **AT_ONCE,
    }
    whole = client.chat.completions.create(messages=messages, **fields).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or []
    assert call.type == "custom"
    assert re.fullmatch(PATTERN, call.custom.input)
    deltas = [
        each
        for chunk in client.chat.completions.create(messages=messages, stream=True, **fields)
        for each in chunk.choices[0].delta.tool_calls or []
    ]
    calls: Any = [each.model_extra["custom"] for each in deltas]  # type: ignore[index]
    assert "".join(each["input"] for each in calls) == call.custom.input
    assert calls[0]["name"] == "patch"
    result = {"role": "tool", "tool_call_id": call.id, "content": ""}
    history = [*messages, whole.message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(messages=history, **fields).choices[0].message.tool_calls


def test_a_model_with_tools_and_a_schema_may_call_or_answer(agent: AgentServer) -> None:
    """Bias, in place of training, makes the model begin a call."""

    def send(bias: dict[str, int], **fields: Any) -> Any:
        tools = [{"type": "function", "function": {"name": "now", "parameters": SCHEMA}}]
        body = {"messages": [{"role": "user", "content": "the fox"}], "tools": tools, "response_format": FORMAT}
        answer = agent.post(
            "/v1/chat/completions",
            body | {"temperature": 1, "logit_bias": bias, "max_tokens": 120, "thinking_token_budget": 0, **fields},
        )
        assert answer.status_code == 200, answer.text
        return ChatCompletion.model_validate(answer.json()).choices[0]

    def token(text: str) -> str:
        answer = agent.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return str(answer.json()["tokens"][0])

    for seed in range(3):
        answer = send({token("<"): -100}, seed=seed)
        jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    called = send({token("<"): 100}, ignore_eos=True)
    assert (called.message.content or "").startswith("<tool_call>")


def test_a_reference_to_a_stored_item_gets_the_setting_that_helps(agent: AgentServer) -> None:
    answer = agent.post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]})
    assert answer.status_code == 400
    assert "store: false" in answer.json()["error"]["message"]


def test_what_the_model_does_not_see_is_counted(agent: AgentServer) -> None:
    def count() -> float:
        return agent.metric("conveyor_engine_ignored_fields_total", kind="chat")

    messages = {"messages": [{"role": "user", "content": "the fox"}], "max_tokens": 1}
    bare = agent.post("/v1/chat/completions", messages).json()
    before = count()
    more = {"tools": [{"type": "web_search"}], "store": True, "service_tier": "flex"}
    full = agent.post("/v1/chat/completions", messages | more).json()
    assert full["usage"]["prompt_tokens"] == bare["usage"]["prompt_tokens"]
    assert count() - before == 3
