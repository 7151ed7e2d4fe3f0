"""Tests what clients may send, without a server."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.serving.preparing.chat_schemas import ChatMessage, ChatRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.fields import ROWS, Place
from conveyor_engine.serving.preparing.refusals import invalid_request
from conveyor_engine.tasks.embed.bodies import EmbeddingRequest

NULL_OF_MESSAGES = {*ChatMessage.model_fields, *ROWS[Place.MESSAGE], "parsed"} - {"role", "content"}


def refuse(schema: type[CompletionRequest] | type[ChatRequest], **fields: Any) -> InvalidRequest:
    """Return the error for these fields in an otherwise valid body."""
    rest: dict[str, Any] = {"prompt": "a"} if schema is CompletionRequest else {"messages": [user("a")]}
    with pytest.raises(ValidationError) as caught:
        schema.model_validate_json(json.dumps({**rest, **fields}))
    return invalid_request(caught.value)


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", "2"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_p", 1.5),
        ("top_k", -2),
        ("seed", 1.5),
        ("seed", 2**64),
        ("stop", 5),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", ["a" * 1025]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("stream", "yes"),
        ("priority", -1),
        ("priority", 1001),
        ("priority", "high"),
        ("return_weight_versions", True),
        ("truncate_prompt_tokens", -2),
        ("truncation_side", "middle"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", "much"),
        ("min_p", 1.1),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"the": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {str(number): 1 for number in range(1025)}),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1] * 1025),
        ("bad_words", "a"),
        ("bad_words", [""]),
        ("bad_words", ["a" * 257]),
        ("bad_words", ["a"] * 129),
        ("use_beam_search", True),
        ("best_of", 2),
        ("include_stop_str_in_output", "yes"),
        ("skip_special_tokens", 0),
        ("return_token_ids", 1),
        ("logprob_token_ids", []),
        ("response_format", {"type": "xml"}),
    ],
)
@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest])
def test_a_bad_value_is_refused_with_its_field(schema: Any, field: str, value: Any) -> None:
    error = refuse(schema, **{field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert str(error).startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 5),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [1.5]),
        ("prompt", [1e400]),
        ("prompt", [-1]),
        ("prompt", [True]),
        ("logprobs", 21),
        ("logprobs", True),
        ("echo", "yes"),
        ("suffix", "x"),
    ],
)
def test_completions_refuse(field: str, value: Any) -> None:
    assert refuse(CompletionRequest, **{field: value}).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages[0].role", [{"role": "<|user|>", "content": "a"}]),
        ("messages[0].role", [{"role": "a" * 65, "content": "a"}]),
        ("messages[0].role", [{"role": "", "content": "a"}]),
        ("messages[0].content", [user([{"type": "image_url", "image_url": {}}])]),
        ("messages[0].content", [user(5)]),
        ("messages[0].content", [user([{"type": "text", "text": 5}])]),
        ("messages[0].tool_calls[0].function", [{"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        ("messages[0].tool_calls[0].function.arguments", [called(5)]),
        ("messages[0]", [{"role": "user"}]),
        ("messages[0].content", [{"role": "assistant", "content": [{"type": "refusal"}]}]),
        *(
            ("messages[0].content", [{"content": [{"type": kind, kind: "a"}], "role": role}])
            for role in ("user", "system", "developer", "tool")
            for kind in ("refusal", "thinking")
        ),
        ("messages[0].content", [{"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]),
        *(
            ("prediction.content", {"type": "content", "content": [{"type": kind, kind: "a"}]})
            for kind in ("refusal", "thinking")
        ),
        ("messages[0].function_call", [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]),
        ("messages[0]", [{**called("{}"), "role": "user"}]),
        ("tools[0]", [{"name": "f"}]),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].function.name", [tool("a b")]),
        ("tools[0].function.name", [tool("a" * 65)]),
        ("tools[0].function.parameters", [tool("f", parameters="x")]),
        ("tools", [tool("f"), tool("f")]),
        ("tools", [tool(f"f{n}") for n in range(129)]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("logprobs", 5),
        ("top_logprobs", 3),
        ("modalities", ["audio"]),
        ("reasoning_effort", "much"),
        ("mm_payload", {"image": "x"}),
        ("chat_template_kwargs", "enable_thinking"),
        ("documents", "a"),
        ("continue_final_message", "yes"),
    ],
)
def test_chat_refuses(field: str, value: Any) -> None:
    fields = {field.split("[")[0].split(".")[0]: value}
    assert refuse(ChatRequest, **fields).param == field


def test_what_clients_send_by_default_is_accepted() -> None:
    neutral = {
        "n": 1, "temperature": None, "top_p": None, "stop": None, "stream": False, "presence_penalty": 0.0,
        "frequency_penalty": 0, "logit_bias": None, "user": "me", "response_format": {"type": "text"}, "seed": None,
        "max_tokens": None, "logprobs": None, "metadata": None, "priority": 0, "service_tier": "default",
        "truncate_prompt_tokens": None, "truncation_side": None, "return_weight_versions": False,
    }  # fmt: skip
    CompletionRequest.model_validate_json(
        json.dumps({"prompt": "a", **neutral, "best_of": 1, "echo": False, "suffix": None})
    )
    chat = {"messages": [user("a")], **neutral, "tools": None, "tool_choice": "none", "parallel_tool_calls": True}
    ChatRequest.model_validate_json(json.dumps(chat | {"service_tier": "auto", "store": False, "tools": []}))


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    answer = {
        "role": "assistant", "content": "b", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None, "parsed": None, "reasoning_content": None,
    }  # fmt: skip
    fields = ChatRequest.model_validate_json(json.dumps({"messages": [user("a"), answer, user("c")]}))
    assert fields.messages_for_template() == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": "any"}, "tool_choice"),
    ],
)
def test_tools_and_their_choice_fit_together(fields: dict[str, Any], param: str) -> None:
    assert (refuse(ChatRequest, **fields).param or "").startswith(param)


def test_calls_and_their_results_are_messages() -> None:
    history = [user("a"), called('{"x": [1]}'), {"role": "tool", "tool_call_id": "1", "content": "b"}, called("")]
    fields = ChatRequest.model_validate_json(json.dumps({"messages": history}))
    shown = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}
    assert fields.messages_for_template()[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [shown]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    assert fields.messages_for_template()[3]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("choice", "shown", "may_call"),
    [
        (None, ["f", "g"], ["f", "g"]),
        ("auto", ["f", "g"], ["f", "g"]),
        ("required", ["f", "g"], ["f", "g"]),
        ("none", [], []),
        ({"type": "function", "function": {"name": "g"}}, ["f", "g"], ["g"]),
    ],
)
def test_a_choice_determines_which_tools_are_shown_and_which_may_be_called(
    choice: Any, shown: list[str], may_call: list[str]
) -> None:
    body = {"messages": [user("a")], "tools": [tool("f", strict=True), tool("g")], "tool_choice": choice}
    fields = ChatRequest.model_validate_json(json.dumps(body))
    rendered = fields.rendering().tools or []
    assert [each["function"] for each in rendered] == [{"name": name} for name in shown]
    assert [each.name for each in fields.tool_use.callable_tools] == may_call


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    fields = ChatRequest.model_validate_json(json.dumps({"messages": [user(parts)]}))
    assert fields.messages_for_template()[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ({"content": None}, {"content": ""}),
        ({"content": None, "tool_calls": []}, {"content": ""}),
        ({"content": None, "reasoning": "r"}, {"content": "", "reasoning_content": "r", "thinking": "r"}),
        ({"content": None, "refusal": "no"}, {"content": "no"}),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": "no"}),
        (
            {"content": [{"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": "b"}]},
            {"content": "b", "reasoning_content": "r", "thinking": "r"},
        ),
    ],
)
def test_an_answer_of_any_server_may_be_sent_back(answer: dict[str, Any], shown: dict[str, Any]) -> None:
    """An answer may have no text, for example if `max_tokens` ended it while the model thought."""
    history = [user("a"), {"role": "assistant", **answer}, user("c")]
    fields = ChatRequest.model_validate_json(json.dumps({"messages": history}))
    assert fields.messages_for_template()[1] == {"role": "assistant", **shown}


@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_may_return_nothing(content: Any) -> None:
    history = [user("a"), called("{}"), {"role": "tool", "tool_call_id": "1", "content": content}]
    fields = ChatRequest.model_validate_json(json.dumps({"messages": history}))
    assert fields.messages_for_template()[2] == {"role": "tool", "tool_call_id": "1", "content": ""}


def test_no_alternatives_need_no_log_probabilities() -> None:
    ChatRequest.model_validate_json(json.dumps({"messages": [user("a")], "logprobs": False, "top_logprobs": 0}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (False, False)),
        ({"include_usage": True}, (True, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (True, True)),
        ({"include_usage": False, "continuous_usage_stats": True}, (False, False)),
        ({"include_usage": None, "continuous_usage_stats": None}, (False, False)),
    ],
)
def test_usage_in_each_chunk_comes_with_usage_at_the_end(options: Any, expected: tuple[bool, bool]) -> None:
    body = {"prompt": "a", "stream": True, "stream_options": options}
    fields = CompletionRequest.model_validate_json(json.dumps(body))
    assert fields.stream_options is not None
    assert fields.stream_options.usage_wanted() == expected


def test_stream_options_need_a_stream() -> None:
    assert refuse(CompletionRequest, stream_options={"include_usage": True}).param == "stream_options"


@pytest.mark.parametrize(
    ("schema", "body", "ignored"),
    [
        (CompletionRequest, {"prompt": "a", "foo": 1, "foo bar": [{}], "user": "me", "echo": None}, 2),
        (CompletionRequest, {"prompt": "a", "stream": True, "stream_options": {"usage": True}}, 0),
        (ChatRequest, {"messages": [user("a", mood="good")], "foo": None}, 1),
        (ChatRequest, {"messages": [user([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])]}, 0),
        (EmbeddingRequest, {"input": "a", "temperature": 1, "user": None}, 1),
    ],
)
def test_what_nobody_defines_is_ignored_and_in_the_request_itself_counted(schema: Any, body: Any, ignored: int) -> None:
    assert schema.model_validate_json(json.dumps(body)).ignored == ignored


def test_a_wrong_bias_is_named_and_no_more_of_them_than_a_few() -> None:
    bias = {"1": 5, "bad{1}": 1, "x" * 1000: 1, **{f"worse {number}": 1 for number in range(9)}}
    with pytest.raises(ValidationError) as raised:
        CompletionRequest.model_validate({"prompt": "a", "logit_bias": bias})
    (error,) = raised.value.errors()
    assert error["msg"].endswith(f"; invalid: 'bad(1)', '{'x' * 40}', 'worse 0'")


DEFAULTS = ("n", "encoding_format", "embed_dtype", "endianness")  # which null stands for


@pytest.mark.parametrize("schema", [CompletionRequest, ChatRequest, EmbeddingRequest])
def test_null_is_no_field(schema: Any) -> None:
    """Null is accepted for all fields that are not required."""
    needed: dict[str, Any] = {"prompt": "a", "input": "a"}
    if schema is ChatRequest:
        needed["messages"] = [user("a", **dict.fromkeys(NULL_OF_MESSAGES))]
    names = {*schema.model_fields, *ROWS[schema.place], "more"}
    body = {name: needed.get(name) if name in schema.model_fields else None for name in names}
    bare = {name: value for name, value in body.items() if value is not None}
    full, without = (schema.model_validate_json(json.dumps(each)) for each in (body, bare))
    for name in schema.model_fields:
        assert (getattr(full, name) or None) == (getattr(without, name) or None) or name in DEFAULTS


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (CompletionRequest, {"max_tokens": 5.0, "n": 1.0, "seed": -3.0, "stop_token_ids": [1.0], "prompt": [2.0, 3]}),
        (ChatRequest, {"max_completion_tokens": 5.0, "top_k": 4.0, "truncate_prompt_tokens": -1.0, "priority": 0.0}),
        (EmbeddingRequest, {"dimensions": 5.0, "input": [[2.0]]}),
    ],
)
def test_a_number_without_a_fraction_is_an_integer_as_in_json_schema(schema: Any, fields: dict[str, Any]) -> None:
    rest = {"messages": [user("a")]} if schema is ChatRequest else {"prompt": "a", "input": "a"}
    read = schema.model_validate_json(json.dumps(rest | fields))
    for name, value in fields.items():
        assert "." not in str(getattr(read, name)) or name not in schema.model_fields
        assert getattr(read, name) in (value, [value])


@pytest.mark.parametrize(
    ("role", "shown"),
    [("developer", "system"), ("function", "tool"), ("ipython", "ipython"), ("my-custom-role", "my-custom-role")],
)
def test_a_template_gets_any_role(role: str, shown: str) -> None:
    read = ChatRequest.model_validate({"messages": [{"role": role, "name": "f", "content": "a"}]})
    assert read.messages_for_template() == [{"role": shown, "name": "f", "content": "a"}]


def test_an_empty_list_of_parts_is_an_empty_text() -> None:
    read = ChatRequest.model_validate({"messages": [{"role": "system", "content": []}, user("a")]})
    assert read.messages_for_template()[0] == {"role": "system", "content": ""}


def test_a_template_gets_thinking_that_it_does_not_refuse() -> None:
    """gpt-oss's template raises an error for thinking beside a text and calls."""
    calls = called("{}")["tool_calls"]
    shown = []
    for content, some in (("b", calls), (None, calls), ("b", [])):
        message = {"role": "assistant", "content": content, "reasoning": "hm", "tool_calls": some}
        read = ChatRequest.model_validate({"messages": [user("a"), message]}).messages_for_template()[1]
        shown.append((read["reasoning_content"], read.get("thinking"), "tool_calls" in read))
    assert shown == [("hm", None, True), ("hm", "hm", True), ("hm", "hm", False)]


def test_a_message_without_content_is_refused() -> None:
    assert "content" in str(refuse(ChatRequest, messages=[{"role": "user"}]))


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_every_shape_of_prompt_is_a_list(prompt: Any) -> None:
    fields = CompletionRequest.model_validate_json(json.dumps({"prompt": prompt}))
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    assert fields.prompt == ([prompt] if single else prompt)
