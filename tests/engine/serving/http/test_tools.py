"""Tests tool calls on a real server with a random model.

Only the grammar makes it call; only the parser finds the calls.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "maxLength": 8}},
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "additionalProperties": False}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "It.", "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES: Any = [{"role": "user", "content": "How will it be?"}]
CLIENT: dict[str, Any] = {"api_key": "none", "max_retries": 0}
TOOLS_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server with a model whose template shows its format of calls."""
    folder = tmp_path_factory.mktemp("hermes")
    model = write_chat_model(folder / "tiny")
    (model / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    with EngineServer(folder, model, max_num_seqs=2) as started:
        yield started.wait_ready()


@pytest.fixture(params=[pytest.param("server", marks=pytest.mark.slow), "hermes"])
def either(request: pytest.FixtureRequest) -> EngineServer:
    """Servers with a model without a known format, and with one that uses Hermes's."""
    server: EngineServer = request.getfixturevalue(request.param)
    return server


def send(server: EngineServer, **fields: Any) -> ChatCompletion:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 300, "temperature": 1, "seed": 0, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def check_calls(answer: ChatCompletion) -> int:
    """Check that each call is valid. Returns their number."""
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls: Any = choice.message.tool_calls
    for call in calls:
        assert call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)
    return len(calls)


def test_a_tool_that_is_named_is_called_with_valid_arguments(either: EngineServer) -> None:
    for seed in range(4):
        answer = send(either, tool_choice=NAMED, seed=seed)
        assert check_calls(answer) == 1
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"  # type: ignore[index, union-attr]


def test_where_a_call_is_required_some_tool_is_called(either: EngineServer) -> None:
    names = set()
    for seed in range(8):
        answer = send(either, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert check_calls(answer) == 1
        names.add(answer.choices[0].message.tool_calls[0].function.name)  # type: ignore[index, union-attr]
    assert names <= SCHEMAS.keys()


def test_a_tool_without_parameters_is_called_without_arguments(either: EngineServer) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    for seed in range(3):
        answer = send(either, tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
        assert [json.loads(call.function.arguments) for call in answer.message.tool_calls or []] == [{}]  # type: ignore[union-attr]


def test_several_tools_may_be_called(either: EngineServer) -> None:
    numbers = set()
    for seed in range(12):
        answer = send(either, tool_choice="required", seed=seed, max_tokens=900)
        if answer.choices[0].finish_reason != "length":
            numbers.add(check_calls(answer))
    assert max(numbers) > 1


@pytest.mark.parametrize("choice", [NAMED, "required"])
def test_a_stream_reports_the_same_calls(either: EngineServer, choice: Any) -> None:
    for seed in range(3):
        body = {"tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
        (whole,) = send(either, **body).choices
        with OpenAI(base_url=either.url + "/v1", **CLIENT) as client:
            stream: Any = client.chat.completions.create(
                model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=300, temperature=1, stream=True, **body
            )
            chunks = [chunk.choices[0] for chunk in stream]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert [call.index for call in calls] == [0] * len(calls)
        assert [(call.function.name, call.type) for call in calls if call.id] == [
            (whole.message.tool_calls[0].function.name, "function")  # type: ignore[index, union-attr]
        ]
        # Strict clients refuse `"id": null`.
        assert all(call.model_fields_set == {"index", "function"} for call in calls[1:])
        assert all(call.function.model_fields_set == {"arguments"} for call in calls[1:])
        arguments = "".join(call.function.arguments for call in calls)
        assert arguments == whole.message.tool_calls[0].function.arguments  # type: ignore[index, union-attr]
        assert len(calls) > 2 or arguments == "{}"
        assert not any(chunk.delta.content for chunk in chunks)
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


class GetWeather(BaseModel):
    """The client makes a strict schema of this."""

    city: str
    days: int


def test_the_client_s_helpers_know_the_calls(hermes: EngineServer) -> None:
    import openai

    tool = openai.pydantic_function_tool(GetWeather)
    with OpenAI(base_url=hermes.url + "/v1", **CLIENT) as client:
        fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
        fields |= {"temperature": 1, "seed": 3, "max_tokens": 2000, "parallel_tool_calls": False}
        message = client.chat.completions.parse(**fields).choices[0].message
        assert isinstance(message.tool_calls[0].function.parsed_arguments, GetWeather)  # type: ignore[index]
        with client.chat.completions.stream(**fields) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls[0].function.arguments == message.tool_calls[0].function.arguments  # type: ignore[index]
        history: Any = [
            *MESSAGES, final.model_dump(), {"role": "tool", "tool_call_id": final.tool_calls[0].id, "content": "sun"},  # type: ignore[index]
        ]  # fmt: skip
        answer = client.chat.completions.create(model="tiny", messages=history, tools=[tool], max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")


def test_a_model_that_is_free_to_call_answers_with_text_too(hermes: EngineServer) -> None:
    free = send(hermes, seed=1, max_tokens=20, ignore_eos=True).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content
    assert free.finish_reason == "length"


def test_what_a_free_model_writes_as_a_call_is_one(hermes: EngineServer) -> None:
    """A grammar, which is not that of a tool, replaces a model that can call tools."""
    text = 'Look: <tool_call>\\n{"name": "now", "arguments": {}}\\n</tool_call>\\n'
    for number in (1, 2):
        answer = send(hermes, guided_regex=f"(?:{text.replace('{', '[{]').replace('}', '[}]')}){{{number}}}")
        message = answer.choices[0].message
        assert [call.function.name for call in message.tool_calls or []] == ["now"] * number  # type: ignore[union-attr]
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_call_that_is_cut_is_reported_as_far_as_it_is_complete(hermes: EngineServer) -> None:
    whole = send(hermes, tool_choice=NAMED, seed=5)
    num_tokens = whole.usage.completion_tokens  # type: ignore[union-attr]
    cut = send(hermes, tool_choice=NAMED, seed=5, max_tokens=num_tokens - 20).choices[0]
    assert cut.finish_reason == "length"
    (call,) = cut.message.tool_calls  # type: ignore[misc]
    arguments = whole.choices[0].message.tool_calls[0].function.arguments  # type: ignore[index, union-attr]
    assert arguments.startswith(call.function.arguments)  # type: ignore[union-attr]


def test_tools_are_shown_to_the_model_unless_it_may_call_none(hermes: EngineServer) -> None:
    def count(**fields: Any) -> int:
        return send(hermes, max_tokens=1, **fields).usage.prompt_tokens  # type: ignore[union-attr]

    bare = count(tools=None)
    assert count(tool_choice="none") == bare
    assert count() == count(tool_choice="required") == count(tool_choice=NAMED) > bare + 50


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": TOOLS}, "tool_choice", "chat template has no known format of tool calls; send tool_choice"),
        ({"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
          "tool_choice": "required"}, "tools[1].function.parameters", "type at #: the value must be"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"title": "a" * 70_000}}}],
          "tool_choice": "required"}, "tools[0].function.parameters", "more than 65536"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": {"title": "a" * 60_000}}}
                    for n in range(5)], "tool_choice": "required"}, "tools", "more than 262144"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
         "messages[0].tool_calls[0].function.arguments", "object"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_with_its_field(
    server: EngineServer, fields: dict[str, Any], param: str, words: str
) -> None:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, **fields})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
