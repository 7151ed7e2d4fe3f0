"""The document at /openapi.json says of requests what the workers say, and of answers what a real engine answers."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError
from starlette.testclient import TestClient
from tests.engine.processes import EngineServer
from tests.openapi import find_references

from conveyor_engine.serving.http import app
from conveyor_engine.serving.http.app import ROUTES
from conveyor_engine.serving.http.openapi import build_document
from conveyor_engine.serving.http.usage import UsageReports
from conveyor_engine.serving.metrics import EngineMetrics
from conveyor_engine.serving.preparing.fields import ROWS, Place
from conveyor_engine.serving.preparing.schemas import ChatRequest, CompletionRequest, EmbeddingRequest
from conveyor_engine.tasks.classify.bodies import ClassificationRequest, PredictRequest
from conveyor_engine.tasks.rerank.bodies import RerankRequest, ScoreRequest, TeiRerankRequest

DOCUMENT = build_document()
CHAT = {"messages": [{"role": "user", "content": "a"}]}
COMPLETION = {"prompt": "a"}
EMBEDDING = {"input": "a"}
REQUESTS: tuple[tuple[type[BaseModel], dict[str, Any], Place | None], ...] = (
    (ChatRequest, CHAT, Place.CHAT),
    (CompletionRequest, COMPLETION, Place.COMPLETIONS),
    (EmbeddingRequest, EMBEDDING, Place.EMBEDDINGS),
    (RerankRequest, {"query": "a", "documents": ["b"]}, Place.RERANK),
    (ScoreRequest, {"text_1": "a", "text_2": "b"}, Place.SCORE),
    (TeiRerankRequest, {"query": "a", "texts": ["b"]}, None),
    (ClassificationRequest, {"input": "a"}, Place.CLASSIFY),
    (PredictRequest, {"inputs": "a"}, None),
)
VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2, 129, 0.5, 1.5, 2.5, -0.5, 2**31, 2**63, "", "a", "text", "none", "medium",
    [], ["a"], ["a", 1], [1], [[1]], [[]], [-1], ["text"], [{}], {}, {"type": "text"}, {"include_usage": True},
    {"a": 1}, ["a"] * 17, "a" * 1025, ["a", "b"], [["a"]], [["a", "b"], ["a"]], [["a", "b", "c"]], [["a"], "b"], [""],
    [{"text": "a"}], [{"text": 1}], "Left", "left", "right",
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
    {"role": "user", "content": "a", "name": "n", "more": None},
)


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
    """Every field with every kind of value, and what depends on another field."""
    for name in (*model.model_fields, *(ROWS[place] if place else ()), "more"):
        for value in VALUES:
            yield base | {name: value}
            yield base | {name: value, "stream": True, **({"logprobs": True} if place is Place.CHAT else {})}
    yield {}


@pytest.mark.parametrize(("model", "base", "place"), REQUESTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_body_fits_the_document_exactly_if_a_worker_takes_it(
    model: type[BaseModel], base: dict[str, Any], place: Place | None
) -> None:
    validator = Draft202012Validator(find_schema(model.__name__))
    bodies = [body for body in make_bodies(model, base, place) if not is_beyond_json_schema(body)]
    verdicts = [(body, accepts(model, body), validator.is_valid(body)) for body in bodies]
    assert [body for body, taken, fitting in verdicts if taken != fitting] == []
    assert {taken for _, taken, _ in verdicts} == {True, False}


def is_beyond_json_schema(body: dict[str, Any]) -> bool:
    """Two limits of one thing, which must agree: told in words."""
    return "max_tokens" in body and "max_completion_tokens" in body


@pytest.mark.parametrize("message", MESSAGES, ids=str)
def test_a_message_fits_exactly_if_a_worker_takes_it(message: dict[str, Any]) -> None:
    body = {"messages": [message]}
    assert fits("ChatRequest", body) == accepts(ChatRequest, body)


def test_the_document_is_whole() -> None:
    told = {(method.upper(), path) for path, of in DOCUMENT["paths"].items() for method in of}
    assert told == {(method, path.replace(":path", "")) for method, path in ROUTES}
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
    served = TestClient(app.build_app(SimpleNamespace(metrics=EngineMetrics("tiny"), usage=UsageReports())))
    for _ in range(2):
        assert served.get("/openapi.json").json() == {"openapi": "3.1.0"}
    assert built == [1]


@pytest.mark.parametrize(
    "path",
    [
        path
        for method, path in ROUTES
        if method == "GET" and path not in ("/metrics", "/place", "/v1/models/{model:path}")
    ],
)
def test_a_page_is_as_it_says(server: EngineServer, path: str) -> None:
    answer = server.get(path)
    Draft202012Validator(find_answer(path, answer.status_code)).validate(answer.json())


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)], ids=["chat", "completion"]
)
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"n": 2}, {"temperature": 3}, {"model": "other"}], ids=str)
def test_an_answer_is_as_it_says(server: EngineServer, path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    if "logprobs" in more and path.startswith("/v1/chat"):
        more = {"logprobs": True, "top_logprobs": 2}
    answer = server.post(path, body | {"max_tokens": 3} | more)
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
