"""Tests /v1/messages on a real server with a random model and Anthropic's client. The answers are those of chat."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from tests.engine.chat_model import CONTEXT_TOKENS
from tests.engine.serving.http.agents import AgentServer

USER: Any = [{"role": "user", "content": "the fox"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "get_weather", "description": "It.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "now", "input_schema": {"type": "object", "additionalProperties": False}},
]
CALL = 'Look: <tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>\\n done'


@pytest.fixture(scope="module")
def client(agent: AgentServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=agent.url, api_key="sk-any", max_retries=0) as opened:
        yield opened


CLIENTS = {
    *("model", "messages", "max_tokens", "system", "tools", "tool_choice", "thinking", "stop_sequences", "stream"),
    *("output_config", "service_tier", "extra_headers"),
}  # the fields that the client knows; others are extensions, or older


def fields_of(**fields: Any) -> dict[str, Any]:
    known = {"model": "tiny", "messages": USER, "max_tokens": 20, "seed": 0, **fields}
    more = {name: value for name, value in known.items() if name not in CLIENTS}
    return {name: value for name, value in known.items() if name in CLIENTS} | {"extra_body": more}


def send(client: Anthropic, **fields: Any) -> Any:
    return client.messages.create(**fields_of(**fields))


def send_streamed(client: Anthropic, **fields: Any) -> tuple[Message, list[str]]:
    """Return the message that the client builds from the stream, and the kinds of the events."""
    with client.messages.stream(**fields_of(**fields)) as stream:
        kinds = [event.type for event in stream]
        return stream.get_final_message(), kinds


def chat(agent: AgentServer, **fields: Any) -> Any:
    response = agent.post("/v1/chat/completions", {"messages": USER, "max_tokens": 20, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_message_is_what_chat_answers(agent: AgentServer, client: Anthropic) -> None:
    message = send(client, temperature=0, ignore_eos=True)
    same = chat(agent, temperature=0, ignore_eos=True)
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == same["choices"][0]["message"]["content"]  # type: ignore[union-attr]
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.id.startswith("msg_")
    counts = same["usage"]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (counts["prompt_tokens"], 20)


def test_an_answer_that_ends_by_itself_has_ended_its_turn(client: Anthropic) -> None:
    message = send(client, seed=1, stop_token_ids=list(range(128)), max_tokens=4000)
    assert message.stop_reason == "end_turn"


BILLING = "x-anthropic-billing-header: cc_version=2.1.220.300; cc_entrypoint=sdk-cli; cch=7adab;"


@pytest.mark.parametrize(
    "system",
    [
        "be kind",
        [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        [{"type": "text", "text": text} for text in (BILLING, "be", "kind")],
    ],
)
def test_the_template_sees_what_it_would_see_of_a_chat(agent: AgentServer, client: Anthropic, system: Any) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []},
            {"type": "text", "text": "c"},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "x"}},
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun", "is_error": False},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [
                {"type": "text", "text": "noon"}, {"type": "tool_reference", "tool_name": "now"}]},
            {"type": "text", "text": "and?"}]},
        {"role": "system", "content": "be brief"},
    ]  # fmt: skip
    calls = [("toolu_1", "get_weather", '{"city": "x"}'), ("toolu_2", "now", "{}")]
    tools = [
        {"type": "function", "function": {k.replace("input_schema", "parameters"): v for k, v in tool.items()}}
        for tool in TOOLS
    ]
    same = [
        {"role": "system", "content": system if isinstance(system, str) else "be\nkind"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [
            {"id": call, "function": {"name": name, "arguments": arguments}} for call, name, arguments in calls]},
        {"role": "tool", "content": "sun", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "noon\nnow", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "and?"},
        {"role": "system", "content": "be brief"},
    ]  # fmt: skip
    body = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    message = send(client, messages=messages, system=system, tools=TOOLS, **body)
    answer = chat(agent, messages=same, tools=tools, **body)
    assert message.usage.input_tokens == answer["usage"]["prompt_tokens"]
    assert message.content[0].text == answer["choices"][0]["message"]["content"]  # type: ignore[union-attr]
    counted = client.messages.count_tokens(model="tiny", messages=messages, system=system, tools=TOOLS)
    assert counted.input_tokens == message.usage.input_tokens


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    fields: Any = {"seed": 3, "max_tokens": 300, "ignore_eos": True}
    text = send(client, **fields).content[0].text  # type: ignore[union-attr]
    stop = text[20:23]
    body: Any = fields | {"stop_sequences": ["never in it", stop]}
    for message in (send(client, **body), send_streamed(client, **body)[0]):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == text[: text.index(stop)]


def test_a_last_message_of_the_assistant_is_continued(agent: AgentServer, client: Anthropic) -> None:
    messages: Any = [*USER, {"role": "assistant", "content": "The answer is ("}]
    message = send(client, messages=messages, temperature=0, ignore_eos=True)
    same = chat(agent, messages=messages, continue_final_message=True, temperature=0, ignore_eos=True)
    assert message.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert message.content[0].text == same["choices"][0]["message"]["content"]  # type: ignore[union-attr]


def test_the_events_are_anthropics_in_their_order(agent: AgentServer) -> None:
    body = {"messages": USER, "max_tokens": 5, "ignore_eos": True, "stream": True, "seed": 1}
    response = agent.post("/v1/messages", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    names = [event[0].removeprefix("event: ") for event in events]
    data = [json.loads(event[1].removeprefix("data: ")) for event in events]
    assert names == [each["type"] for each in data]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert data[0]["message"]["usage"]["input_tokens"] > 0
    assert data[0]["message"]["content"] == []
    assert data[-2]["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "get_weather"}, {"type": "any"}])
def test_a_call_that_is_demanded_is_valid_streamed_or_not(client: Anthropic, choice: Any) -> None:
    schemas = {tool["name"]: tool["input_schema"] for tool in TOOLS}
    for seed in range(3):
        fields: Any = {
            "tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 400,
            "temperature": 1, "seed": seed,
        }  # fmt: skip
        message = send(client, **fields)
        assert message.stop_reason == "tool_use"
        (call,) = message.content
        assert call.type == "tool_use"
        assert call.id.startswith("toolu_")
        jsonschema.validate(call.input, schemas[call.name])
        assert choice["type"] == "any" or call.name == "get_weather"
        same, kinds = send_streamed(client, **fields)
        (streamed,) = same.content
        assert "input_json" in kinds or call.input == {}
        assert (streamed.name, streamed.input) == (call.name, call.input)  # type: ignore[union-attr]


def test_text_and_calls_keep_their_order(client: Anthropic) -> None:
    """A grammar replaces a model that can call tools."""
    body = {"guided_regex": CALL.replace("{", "[{]").replace("}", "[}]")}
    message = send(client, tools=TOOLS, max_tokens=400, **body)
    streamed, _ = send_streamed(client, tools=TOOLS, max_tokens=400, **body)
    for each in (message, streamed):
        text, call, after = each.content
        assert (text.type, call.type, after.type) == ("text", "tool_use", "text")
        assert (text.text, call.name, call.input, after.text) == ("Look:", "now", {}, "done")  # type: ignore[union-attr]
        assert each.stop_reason == "tool_use"


def test_a_wrong_call_of_a_model_is_reported_unchanged(client: Anthropic) -> None:
    wrong = '<tool_call>[{]"name": "now", "arguments": [{]"a": '
    message = send(client, tools=TOOLS, guided_regex=wrong, max_tokens=400)
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.input == {"arguments": '{"a": '}


def test_a_model_that_may_call_none_sees_no_tools(client: Anthropic) -> None:
    bare = send(client).usage.input_tokens
    assert send(client, tools=TOOLS, tool_choice={"type": "none"}).usage.input_tokens == bare
    assert send(client, tools=TOOLS).usage.input_tokens > bare + 50


def test_thinking_is_a_block_of_its_own_within_its_budget(agent: AgentServer, client: Anthropic) -> None:
    never = {"logit_bias": {str(agent.end): -100}, "ignore_eos": True, "seed": 3}  # but for the budget it would not end
    fields: Any = {"thinking": {"type": "enabled", "budget_tokens": 7}, "max_tokens": 60, **never}
    message = send(client, **fields)
    streamed, kinds = send_streamed(client, **fields)
    assert "signature" in kinds
    for each in (message, streamed):
        thinking, text = each.content
        assert (thinking.type, text.type) == ("thinking", "text")
        assert thinking.thinking == message.content[0].thinking != ""  # type: ignore[union-attr]
        assert thinking.signature == each.id  # type: ignore[union-attr]
        assert text.text == message.content[1].text != ""  # type: ignore[union-attr]
        assert each.usage.output_tokens_details.thinking_tokens == 8, "and the mark"  # type: ignore[union-attr]
    back: Any = [*USER, {"role": "assistant", "content": [block.to_dict() for block in message.content]}, *USER]
    assert send(client, messages=back).content


def test_a_model_thinks_only_if_requested(agent: AgentServer, client: Anthropic) -> None:
    body = {"seed": 3, "ignore_eos": True}
    for thinking in ({}, {"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}):
        assert [block.type for block in send(client, **thinking, **body).content] == ["text"]
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    assert [block.type for block in send(client, **body, **kwargs).content] == ["thinking"]
    effort: Any = {"output_config": {"effort": "low"}}
    assert send(client, **effort).usage.input_tokens > send(client).usage.input_tokens


def test_an_answer_follows_a_schema(client: Anthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = send(client, output_config=config, max_tokens=400, temperature=1, seed=1)
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)  # type: ignore[union-attr]


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": CONTEXT_TOKENS}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].source"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
    ({"messages": [*USER, {"role": "assistant", "content": "a</think>b"}]}, "messages"),  # the template hides some
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
     "tool_choice"),
    ({"tools": [{"name": "f", "input_schema": {"type": "thing"}}], "tool_choice": {"type": "any"}},
     "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "none such"}}, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": 9}, "temperature"),
)  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_in_anthropics_form(
    client: Anthropic, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        send(client, **fields, stream=stream)
    body: Any = raised.value.body
    assert body["type"] == "error"
    assert (body["error"]["type"], body["error"]["param"]) == ("invalid_request_error", param)
    assert param.split("[")[0].split(".")[0] in body["error"]["message"]


def test_every_error_has_the_clients_class(agent: AgentServer, client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        send(client, model="other")
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.count_tokens(model="other", messages=USER)
    assert agent.get("/v1/messages").json()["error"]["code"] == "method_not_allowed"
    late = {"X-Request-Timeout-Seconds": "0.3"}
    with pytest.raises(anthropic.InternalServerError, match="timeout_error"):
        send(client, max_tokens=8000, ignore_eos=True, extra_headers=late)


def test_a_stream_that_fails_ends_with_an_error_event(client: Anthropic) -> None:
    late = {"X-Request-Timeout-Seconds": "3"}
    stream = send(client, max_tokens=8000, logit_bias={"0": -100}, extra_headers=late, stream=True)  # it may end
    with pytest.raises(anthropic.APIStatusError, match="timeout_error"):
        for _ in stream:
            pass


def test_a_model_that_does_not_think_answers_requests_for_thinking(server: AgentServer) -> None:
    body = {"messages": USER, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    response = server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    assert [block["type"] for block in response.json()["content"]] == ["text"]


def test_nothing_is_held_for_a_client_that_leaves(agent: AgentServer, client: Anthropic) -> None:
    for _ in range(3):
        stream = send(client, max_tokens=8000, ignore_eos=True, stream=True)
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while any((load := agent.get("/load").json())[name] for name in ("running", "waiting", "kv_cache_usage")):
        assert time.monotonic() < deadline, load
        time.sleep(0.05)
