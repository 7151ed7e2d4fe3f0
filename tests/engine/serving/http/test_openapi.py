"""Tests that the document at /openapi.json agrees with the workers about requests and with a real engine's answers."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient
from tests.engine.processes import EngineServer
from tests.openapi import find_event_schema, find_references

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ErrorCode
from conveyor_engine.serving.engine_client import State
from conveyor_engine.serving.http import app
from conveyor_engine.serving.http.app import ROUTES
from conveyor_engine.serving.http.app_state import AppState
from conveyor_engine.serving.http.failures import error_body
from conveyor_engine.serving.http.openapi import build_document
from conveyor_engine.serving.http.usage import UsageReports
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.preparing.chat_schemas import ChatRequest
from conveyor_engine.serving.preparing.comparing_schemas import RerankRequest, ScoreRequest, TeiRerankRequest
from conveyor_engine.serving.preparing.completion_schemas import CompletionRequest
from conveyor_engine.serving.preparing.fields import ROWS, Place
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.serving.preparing.tokens import DecodeRequest, DetokenizeRequest, TokenizeRequest
from conveyor_engine.tasks.classify.bodies import ClassificationRequest, PredictRequest
from conveyor_engine.tasks.embed.bodies import EmbeddingRequest, EmbedRequest
from conveyor_engine.tasks.generate.preparing.messages_schemas import CountTokensRequest, MessagesRequest
from conveyor_engine.tasks.generate.preparing.responses_schemas import ResponsesRequest

DOCUMENT = build_document()
TOOLS = [{"type": "function", "function": {"name": "f"}}]
MESSAGES_TOOLS = [{"name": "f", "input_schema": {}}]
CHAT = {"messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"prompt": "a"}
EMBEDDING = {"input": "a"}
RESPONSE = {"input": "a"}
MESSAGE = {"max_tokens": 3, "messages": CHAT["messages"]}
REQUESTS: tuple[tuple[type[BaseModel], dict[str, Any], Place | None], ...] = (
    (ChatRequest, CHAT, Place.CHAT),
    (CompletionRequest, COMPLETION, Place.COMPLETIONS),
    (EmbeddingRequest, EMBEDDING, Place.EMBEDDINGS),
    (EmbedRequest, {"inputs": "a"}, None),
    (RerankRequest, {"query": "a", "documents": ["b"]}, Place.RERANK),
    (ScoreRequest, {"text_1": "a", "text_2": "b"}, Place.SCORE),
    (TeiRerankRequest, {"query": "a", "texts": ["b"]}, None),
    (ClassificationRequest, {"input": "a"}, Place.CLASSIFY),
    (PredictRequest, {"inputs": "a"}, None),
    (TokenizeRequest, {"prompt": "a"}, Place.TOKENIZE),
    (DetokenizeRequest, {"tokens": [1]}, Place.TOKENIZE),
    (DecodeRequest, {"ids": [1]}, Place.TOKENIZE),
    (MessagesRequest, MESSAGE, Place.MESSAGES),
    (ResponsesRequest, RESPONSE, Place.RESPONSES),
    (CountTokensRequest, {"messages": MESSAGE["messages"]}, Place.MESSAGES),
)
VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 129, 0.5, 1.5, 2.5, -0.5, 2**31, 2**63, "", "a", "text", "none", "medium",
    [], ["a"], ["a", 1], [1], [[1]], [[]], [-1], ["text"], [{}], {}, {"type": "text"}, {"include_usage": True},
    {"a": 1}, ["a"] * 17, "a" * 1025, ["a", "b"], [["a"]], [["a", "b"], ["a"]], [["a", "b", "c"]], [["a"], "b"], [""],
    [{"text": "a"}], [{"text": 1}], "required", [{"type": "function", "function": {"name": "f"}}],
    [{"type": "function", "function": {"name": "f g"}}], {"type": "function", "function": {"name": "f"}},
    "Left", "left", "right", {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {"type": "enabled"},
    {"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {"effort": "low"},
    {"format": {"type": "json_schema"}}, {"format": {"type": "json_schema", "schema": {}}},
    [{"name": "f", "input_schema": {}}], [{"name": "f"}],
    {"format": {"type": "text"}}, {"type": "function", "name": "f"}, [{"type": "function", "name": "f"}],
    [{"role": "user", "content": "a"}], [{"type": "web_search"}], {"verbosity": "low"}, ["reasoning.encrypted_content"],
    [{"type": "bash_20250124", "name": "bash", "input_schema": {}}],
    *({"type": "content", "content": [{"type": kind, kind: "a"}]} for kind in ("text", "refusal", "thinking")),
    {"json_object": True}, {"json_object": None}, {"json_object": 1}, {"choice": ["a"], "json_object": None},
    {"choice": ["a"], "json_object": False}, {"choice": ["a"], "regex": "a"}, {"choice": ["a"], "json_object": True},
    {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}},
    {"type": "json_schema", "json_schema": {"name": None, "schema": {}}},
)  # fmt: skip
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "user"},
    {"role": "user", "content": None},
    {"role": "tool", "content": "a"},
    {"role": "user", "content": []},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]},
    {"role": "user", "content": [{"type": "text", "text": "a", "more": 1}]},
    {"role": "user", "content": [{"type": "text", "text": 1}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
    {"role": "assistant", "content": "a", "tool_calls": []},
    {"role": "assistant", "content": "a", "tool_calls": [{}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
    {"role": "user", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "tool", "content": "a", "tool_call_id": "1"},
    {"role": "assistant"},
    {"role": "tool", "content": None},
    {"role": "assistant", "refusal": "a"},
    {"refusal": "a"},
    {"role": "assistant", "refusal": 5},
    {"role": "assistant", "function_call": {}},
    {"role": "system"},
    *(
        {"role": role, "content": [part]}
        for role in ("user", "assistant")
        for part in (
            {"type": "refusal", "refusal": "a"},
            {"type": "refusal"},
            {"type": "thinking", "thinking": "a"},
            {"type": "thinking", "thinking": []},
            {"type": "thinking"},
            {"type": "audio"},
            5,
        )
    ),
    {"role": "user", "content": "a", "name": "n", "more": None},
)


ITEMS: tuple[Any, ...] = (
    *({"role": role, "type": kind, "content": content}
      for role in ("user", "assistant", "tool", None)
      for kind in ("message", None, "item_reference")
      for content in ("a", [], 5, [{"type": "input_text", "text": "a"}], [{"type": "output_text", "text": "a"}],
                      [{"type": "refusal", "refusal": "a"}], [{"type": "input_image"}], [{}])),
    {"type": "function_call", "call_id": "1", "name": "f"}, {"role": "user"}, {"content": "a"}, 5, None, "a",
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
    {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call_output", "call_id": "1"}, {"type": "function_call_output", "output": "a"},
    {"type": "reasoning", "summary": []}, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}, {"type": "reasoning", "content": [5]},
)  # fmt: skip
ANTHROPIC_MESSAGES: tuple[dict[str, Any], ...] = (
    *({"role": role, "content": [block]}
      for role in ("user", "assistant", "system")
      for block in (
          {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text"}, {"type": "image"},
          {"type": "thinking", "thinking": "a", "signature": "b"}, {"type": "redacted_thinking", "data": "a"},
          {"type": "tool_use", "id": "1", "name": "f", "input": {}}, {"type": "tool_use", "id": "1", "name": "f"},
          {"type": "tool_result", "tool_use_id": "1"}, {"type": "tool_result", "tool_use_id": "1", "content": "a"},
          {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}, {}, 5, None, "a",
          {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "f"}]},
          {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference"}]},
          {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, {"type": "mcp_tool_result"})),
    {"role": "user", "content": "a"}, {"role": "user", "content": []}, {"role": "user", "content": None},
    {"role": "user"}, {"role": "tool", "content": "a"}, {"content": "a"}, {"role": "user", "content": 5},
)  # fmt: skip


def find_schema(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}


def fits(name: str, value: object) -> bool:
    return Draft202012Validator(find_schema(name)).is_valid(value)


def accepts(model: type[BaseModel], body: object) -> bool:
    try:
        model.model_validate_json(json.dumps(body))
    except ValidationError:
        return False
    return True


def make_bodies(model: type[BaseModel], base: dict[str, Any], place: Place | None) -> Iterator[dict[str, Any]]:
    """Yield bodies with each field and each kind of value, and with fields that depend on each other."""
    for name in (*model.model_fields, *(ROWS[place] if place else ()), "more"):
        for value in VALUES:
            yield base | {name: value}
            if place is Place.CHAT:
                yield base | {"tools": TOOLS, "tool_choice": "required", name: value}
            if place is Place.RESPONSES:
                yield base | {"tools": [{"type": "function", "name": "f"}], "tool_choice": "required", name: value}
            if place is Place.MESSAGES:
                yield base | {"tools": MESSAGES_TOOLS, "tool_choice": {"type": "any"}, name: value}
            yield base | {name: value, "stream": True, **({"logprobs": True} if place is Place.CHAT else {})}
    yield {}


@pytest.mark.parametrize(("model", "base", "place"), REQUESTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_body_fits_the_document_exactly_if_a_worker_takes_it(
    model: type[BaseModel], base: dict[str, Any], place: Place | None
) -> None:
    validator = Draft202012Validator(find_schema(model.__name__))
    verdicts = [(body, accepts(model, body), validator.is_valid(body)) for body in make_bodies(model, base, place)]
    assert [body for body, taken, fitting in verdicts if taken != fitting] == []
    assert {taken for _, taken, _ in verdicts} == {True, False}


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_an_item_fits_exactly_if_a_worker_takes_it(item: Any) -> None:
    body = {"input": [item]}
    assert fits("ResponsesRequest", body) == accepts(ResponsesRequest, body)


@pytest.mark.parametrize("message", ANTHROPIC_MESSAGES, ids=str)
def test_a_message_of_anthropics_fits_exactly_if_a_worker_takes_it(message: dict[str, Any]) -> None:
    body = MESSAGE | {"messages": [message]}
    assert fits("MessagesRequest", body) == accepts(MessagesRequest, body)


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_a_message_fits_exactly_if_a_worker_takes_it(message: dict[str, Any]) -> None:
    body = {"messages": [message]}
    assert fits("ChatRequest", body) == accepts(ChatRequest, body)


def test_the_document_is_whole() -> None:
    documented = {(method.upper(), path) for path, of in DOCUMENT["paths"].items() for method in of}
    assert documented == {(method, path.replace(":path", "")) for method, path in ROUTES}
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    references = set(find_references(DOCUMENT))
    assert references == {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}


def find_answer(path: str, status: int, method: str = "get") -> dict[str, Any]:
    content = DOCUMENT["paths"][path][method]["responses"][str(status)]["content"]
    return content["application/json"]["schema"] | {"components": DOCUMENT["components"]}


def test_a_real_engine_serves_it(server: EngineServer) -> None:
    assert server.get("/openapi.json").json() == DOCUMENT


def test_it_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    monkeypatch.setattr(app, "build_document", lambda: built.append(1) or {"openapi": "3.1.0"})
    state = SimpleNamespace(metrics=EngineMetrics("tiny"), usage=UsageReports(), callers=None)
    served = TestClient(app.build_app(state))
    for _ in range(2):
        assert served.get("/openapi.json").json() == {"openapi": "3.1.0"}
    assert built == [1]


@pytest.mark.parametrize(
    "path",
    [
        path
        for method, path in ROUTES
        if method == "GET" and path not in ("/metrics", "/place") and "{model" not in path
    ],
)
def test_a_page_is_as_it_says(server: EngineServer, path: str) -> None:
    answer = server.get(path)
    Draft202012Validator(find_answer(path, answer.status_code)).validate(answer.json())


@pytest.mark.parametrize(
    "path", ["/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/{model}/ready"]
)
def test_a_page_of_an_engine_that_does_not_run_is_as_it_says(path: str) -> None:
    config, workers = EngineConfig(model="m"), SimpleNamespace(is_alive=True)
    engine = SimpleNamespace(state=State.DEAD, is_alive=False)
    model, usage = ServedModel("m", None, SamplingDefaults()), UsageReports()
    state = AppState(config, model, engine, EngineMetrics("m"), workers, None, None, usage, 0)  # type: ignore[arg-type]
    answer = TestClient(app.build_app(state)).get(path.replace("{model}", "m"))
    assert answer.status_code == 503
    Draft202012Validator(find_answer(path, 503)).validate(answer.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", COMPLETION),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", RESPONSE),
    ],
    ids=["chat", "completion", "message", "response"],
)
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2}, {"temperature": 3}, {"model": "other"}], ids=str)
def test_an_answer_is_as_it_says(server: EngineServer, path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    if "logprobs" in more and path.startswith("/v1/chat"):
        more = {"logprobs": True, "top_logprobs": 2}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = server.post(path, body | {limit: 3} | more)
    Draft202012Validator(find_answer(path, answer.status_code, "post")).validate(answer.json())


@pytest.mark.parametrize(
    ("path", "body", "chunk"),
    [("/v1/chat/completions", CHAT, "ChatChunk"), ("/v1/completions", COMPLETION, "Completion")],
    ids=["chat", "completion"],
)
def test_an_event_is_as_it_says(server: EngineServer, path: str, body: dict[str, Any], chunk: str) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    answer = server.post(path, body | {"max_tokens": 3, "stream": True, "stream_options": usage})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert len(events) > 2
    for event in events[:-1]:
        assert fits(chunk, json.loads(event)), event


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE | {"max_output_tokens": 3})]
)
def test_a_named_event_is_as_it_says(server: EngineServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body | {"stream": True, "temperature": 0})
    events = [
        event.partition("\ndata: ") for event in answer.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")
    ]
    schema = find_event_schema(DOCUMENT["paths"][path]["post"])
    validator = Draft202012Validator(schema | {"components": DOCUMENT["components"]})
    assert len(events) > 4
    for _, _, data in events:
        validator.validate(json.loads(data))


def test_the_error_that_ends_a_stream_is_one_of_its_events() -> None:
    streams = [path for path, methods in DOCUMENT["paths"].items() if "itemSchema" in json.dumps(methods.get("post"))]
    assert len(streams) > 5
    for path in streams:
        schema = find_event_schema(DOCUMENT["paths"][path]["post"])
        validator = Draft202012Validator(schema | {"components": DOCUMENT["components"]})
        validator.validate(json.loads(error_body("too late", ErrorCode.DEADLINE_EXCEEDED, path=path)))


def test_headers_fit_the_document_exactly_if_the_engine_takes_them(server: EngineServer) -> None:
    headers = {row["name"]: row["schema"] for row in DOCUMENT["paths"]["/tokenize"]["post"]["parameters"]}
    for name, value in (("X-Request-Timeout-Seconds", seconds) for seconds in (0, 0.0009, 0.001, 30)):
        status = server.post("/tokenize", {"prompt": "a"}, **{name: str(value)}).status_code
        assert (status != 400) == Draft202012Validator(headers[name]).is_valid(value)
    for value in ("a", "a b", "a" * 129):
        assert server.post("/tokenize", {"prompt": "a"}, **{"X-Request-Id": value}).status_code == 200
        assert Draft202012Validator(headers["X-Request-Id"]).is_valid(value)
