"""Tests what the model sees of tools that are no functions, and of earlier calls of such tools."""

from typing import Any

import pytest
from pydantic import ValidationError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.tool_use import CalledAs
from conveyor_engine.tasks.generate.preparing.messages_schemas import MessagesRequest
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest
from conveyor_engine.text.grammar import GRAMMAR_CHARACTERS_MAX, BuiltGrammar, build_grammar
from conveyor_engine.text.parsing.dialect import Dialect

SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}}
SPAWN = {"type": "function", "name": "spawn", "description": "Begin.", "strict": False, "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "text"}}
WAIT = {"type": "function", "name": "wait"}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [SPAWN, PATCH, {"type": "x"}]}
USER: list[Any] = [{"role": "user", "content": "a"}]


def respond(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "a", **fields})


def test_a_namespace_is_shown_as_functions_and_named_back() -> None:
    use = respond(tools=[WAIT, NAMESPACE]).tool_use
    shown = [(each.tool.function.name, each.tool.function.description) for each in use.tools]
    assert shown == [("wait", None), ("agents__spawn", "Helpers.\n\nBegin."), ("agents__patch", "Edit.")]
    assert use.called_as == {
        "agents__spawn": CalledAs("spawn", "agents"), "agents__patch": CalledAs("patch", "agents", True),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "shown", "may_call", "only_one"),
    [
        ({"type": "function", "name": "spawn"}, ["wait", "agents__spawn", "agents__patch"], ["agents__spawn"], True),
        ({"type": "custom", "name": "patch"}, ["wait", "agents__spawn", "agents__patch"], ["agents__patch"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "wait"}]},
         ["wait"], ["wait"], False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "wait"}]},
         ["wait", "agents__spawn", "agents__patch"], ["wait"], False),
    ],
)  # fmt: skip
def test_a_choice_names_tools_as_the_client_knows_them(
    choice: Any, shown: list[str], may_call: list[str], only_one: bool
) -> None:
    use = respond(tools=[WAIT, NAMESPACE], tool_choice=choice).tool_use
    assert [each.name for each in use.tools] == shown
    assert [each.name for each in use.callable_tools] == may_call
    assert use.only_one_call == only_one


def test_an_unknown_name_is_refused_beside_one_that_two_namespaces_have() -> None:
    tools = [NAMESPACE, {**NAMESPACE, "name": "others"}]
    chosen = [{"type": "function", "name": name} for name in ("spawn", "no")]
    with pytest.raises(ValidationError, match="tool_choice must name one of tools"):
        respond(tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": chosen})
    use = respond(tools=tools, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": chosen[:1]}).tool_use
    assert [each.name for each in use.callable_tools] == ["agents__spawn", "others__spawn"]


def test_a_forced_call_names_one_tool() -> None:
    tools = [NAMESPACE, {**NAMESPACE, "name": "others"}]
    with pytest.raises(ValidationError, match="use one of these names: agents__spawn, others__spawn"):
        respond(tools=tools, tool_choice={"type": "function", "name": "spawn"})
    for name, beside in (("others__spawn", []), ("spawn", [SPAWN])):
        use = respond(tools=[*tools, *beside], tool_choice={"type": "function", "name": name}).tool_use
        assert [each.name for each in use.callable_tools] == [name]


def test_all_namespaces_together_have_128_tools() -> None:
    spaces = [
        {"type": "namespace", "name": f"n{number}", "tools": [{**WAIT, "name": f"f{each}"} for each in range(43)]}
        for number in range(3)
    ]
    with pytest.raises(ValidationError, match="at most 128 tools, those of namespaces included"):
        respond(tools=spaces)
    assert len(respond(tools=[*spaces[:2], *spaces[2]["tools"][:42]]).tool_use.tools) == 128


def test_a_choice_of_a_call_and_a_form_is_validated() -> None:
    use = respond(tools=[WAIT]).tool_use
    form = build_grammar("choice", ["a" * (GRAMMAR_CHARACTERS_MAX - 100)], "form")
    with pytest.raises(InvalidRequest, match=r"tools cannot be followed: it has \d+ characters"):
        use.add_calls(form, Dialect("hermes"), lambda mark: None)
    with pytest.raises(InvalidRequest, match="tools cannot be followed: it is too complex"):
        use.add_calls(BuiltGrammar("start: 5"), Dialect("hermes"), lambda mark: None)


def test_earlier_calls_have_the_names_that_the_model_sees() -> None:
    items = [
        *USER,
        {"type": "function_call", "call_id": "1", "name": "spawn", "namespace": "agents", "arguments": '{"a": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** c"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": []},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "done"},
    ]  # fmt: skip
    request = respond(input=items)
    _, calls, first, second = request.conversation()
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in calls["tool_calls"]] == [
        ("agents__spawn", {"a": 1}), ("patch", {"input": "*** c"}),
    ]  # fmt: skip
    assert (first["content"], second["content"]) == ("", "done")
    assert request.ignored == 1


@pytest.mark.parametrize(
    ("choice", "followed"),
    [
        ({"type": "custom", "name": "math"}, "math"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "math"}]}, "math"),
        ({"type": "custom", "name": "patch"}, None),
        ("required", None),
        ("auto", None),
    ],
)
def test_a_call_follows_a_grammar_in_lark_if_it_can_only_be_that_tool_s(choice: Any, followed: str | None) -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}
    tools = [{"type": "custom", "name": "math", "format": lark}, PATCH]
    use = respond(tools=tools, tool_choice=choice).tool_use
    assert (use.followed and use.followed.name) == followed
    parsing = use.find_parsing(Dialect("hermes"))
    assert (parsing.input_of, list(parsing.texts)) == (("math", []) if followed else ("", ["math", "patch"]))


def test_a_grammar_is_shown_and_a_regular_expression_is_the_schema_s() -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[ab]+"}}
    tools = [{"type": "custom", "custom": {"name": "f", "description": "It.", "format": grammar}}]
    (offered,) = ChatRequest.model_validate({"messages": USER, "tools": tools}).tool_use.tools
    function = offered.tool.function
    assert function.description == "It.\n\nThe input must match this regex grammar:\n[ab]+"
    assert function.parameters
    assert function.parameters["properties"] == {"input": {"type": "string", "pattern": "^(?:[ab]+)$"}}


@pytest.mark.parametrize("arguments", ['{"', "[1]", "", "5", '{"a": 1'])
def test_a_call_that_was_cut_or_badly_written_has_no_arguments(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = ChatRequest.model_validate({"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]})
    item = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
    block = {"type": "tool_use", "id": "1", "name": "f", "input": arguments}
    messages = MessagesRequest.model_validate(
        {"max_tokens": 1, "messages": [*USER, {"role": "assistant", "content": [block]}]}
    )
    for conversation in (
        chat.messages_for_template(), respond(input=[*USER, item]).conversation(), messages.conversation(),
    ):  # fmt: skip
        assert conversation[1]["tool_calls"][0]["function"]["arguments"] == {}


HOSTED: Any = [{"type": "web_search"}, {"type": "mcp", "server_label": "a"}, {"type": "image_generation"}]


def test_tools_of_other_kinds_are_left_out_and_counted() -> None:
    chat = ChatRequest.model_validate({"messages": USER, "tools": HOSTED})
    anthropic = [{"type": "web_search_20250305", "name": "web_search"}, {"name": "f", "input_schema": SCHEMA}]
    messages = MessagesRequest.model_validate({"messages": USER, "max_tokens": 1, "tools": anthropic})
    responses = respond(tools=[*HOSTED, WAIT], text={"verbosity": "low"})
    assert [len(each.tool_use.tools) for each in (chat, messages, responses)] == [0, 1, 1]
    assert [each.ignored for each in (chat, messages, responses)] == [3, 1, 4]


@pytest.mark.parametrize(
    ("schema", "fields", "number"),
    [
        (ChatRequest, {"store": True, "verbosity": "low", "web_search_options": {}, "service_tier": "flex"}, 4),
        (ChatRequest, {"store": False, "verbosity": "medium", "service_tier": "auto", "metadata": {"a": "b"}}, 0),
        (ChatRequest, {"reasoning": {"effort": "low", "exclude": True}}, 0),
        (ResponsesRequest, {"store": True, "truncation": "auto", "context_management": [{"type": "compaction"}]}, 3),
        (MessagesRequest, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
                           "speed": "fast", "mcp_servers": [{}], "container": "a", "service_tier": "priority"}, 5),
    ],
)  # fmt: skip
def test_fields_without_effect_are_counted(schema: Any, fields: Any, number: int) -> None:
    body = {"input": "a"} if schema is ResponsesRequest else {"messages": USER, "max_tokens": 1}
    assert schema.model_validate(body | fields).ignored == number
