"""The document at /openapi.json: what this server takes and answers, from the schemas that it validates and encodes by.

Built once by `app`. Bodies are validated in worker processes (ADR 6) and answers are encoded as structs, so FastAPI
cannot derive the document from signatures; here it is put together from the same pydantic models, table of fields,
structs and errors that act, and FastAPI serves it. Pure.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from conveyor_engine import __version__
from conveyor_engine.errors import ErrorCode
from conveyor_engine.serving.http.answers import ErrorAnswer, Load, Model, ModelList, Status, Version
from conveyor_engine.serving.http.chat import ChatChunk, ChatCompletion
from conveyor_engine.serving.http.completions import Completion
from conveyor_engine.serving.http.embeddings import EmbeddingList
from conveyor_engine.serving.http.usage import UsedTokens
from conveyor_engine.serving.preparing.fields import ROWS
from conveyor_engine.serving.preparing.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    StreamOptions,
)

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_REQUESTS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, EmbeddingRequest, ChatMessage, StreamOptions)
_ANSWERS = (
    ChatCompletion,
    ChatChunk,
    Completion,
    EmbeddingList,
    ErrorAnswer,
    ModelList,
    Model,
    Status,
    Version,
    Load,
    UsedTokens,
)
_HEADERS = [
    {"name": "X-Request-Id", "in": "header", "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,128}$"}},
    {"name": "X-Request-Timeout-Seconds", "in": "header", "schema": {"type": "number", "exclusiveMinimum": 0}},
]


def build_document() -> Json:
    """The document, in OpenAPI 3.1: its schemas are JSON Schema 2020-12."""
    paths: Json = {}
    for path, method, operation in _operations():
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Conveyor engine", "version": __version__},
        "paths": paths,
        "components": {"schemas": dict(sorted((_request_schemas() | _answer_schemas()).items()))},
    }


def _operations() -> Iterator[tuple[str, str, Json]]:
    yield "/v1/chat/completions", "post", _generation("Answers a conversation.", ChatRequest, ChatCompletion, ChatChunk)
    yield "/v1/completions", "post", _generation("Continues prompts.", CompletionRequest, Completion, Completion)
    yield (
        "/v1/embeddings",
        "post",
        _task_path("Makes a vector of each input.", EmbeddingRequest, _content(EmbeddingList)),
    )
    yield "/v1/models", "get", _page("Lists the model.", ModelList)
    one = _page("Describes the model, if its id is this one; ids may have slashes.", Model, (404,))
    one["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    yield "/v1/models/{model}", "get", one
    for base in ("", "/v1"):
        for name in ("health", "ping"):
            yield f"{base}/{name}", "get", _probe("Whether requests are taken.")
        yield f"{base}/version", "get", _page("The engine's version.", Version)
    yield "/livez", "get", _probe("Whether the engine lives, also while it loads.")
    yield "/readyz", "get", _probe("Whether requests are taken.")
    yield "/load", "get", _page("Who runs and who waits.", Load)
    yield "/place", "get", _of_place("Keeps a place for the next request of a gateway, as soon as there is one.")
    yield "/place", "delete", _of_place("The place is not needed.")
    used = _page("What a request has used, by its gateway's key.", UsedTokens, (404,))
    used["parameters"] = [{"name": "key", "in": "query", "required": True, "schema": {"type": "string"}}]
    yield "/usage", "get", used
    metrics = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    yield "/metrics", "get", {"summary": "Metrics.", "responses": {"200": metrics}}


def _generation(summary: str, request: type, answer: type, chunk: type) -> Json:
    whole = _content(answer)
    # OpenAPI 3.1 has no keyword for the schema of an event.
    events = {"text/event-stream": {"schema": {"type": "string"}, "x-event-schema": _reference(chunk)}}
    description = (
        f"Whole, or with `stream` server-sent events, each `data: ` and a {chunk.__name__}, the last `data: [DONE]`."
    )
    return _task_path(summary, request, whole | events, description)


def _task_path(summary: str, request: type, content: Json, description: str = "Whole.") -> Json:
    """A path for one task. An engine of the other task answers 400 `wrong_task`."""
    statuses = {code.status for code in ErrorCode}
    return {
        "summary": summary,
        "parameters": _HEADERS,
        "requestBody": {"required": True, "content": _content(request)},
        "responses": {"200": {"description": description, "content": content}, **_refusals(statuses)},
    }


def _page(summary: str, answer: type, refusals: tuple[int, ...] = ()) -> Json:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": _content(answer)}, **_refusals(set(refusals))},
    }


def _probe(summary: str) -> Json:
    yes, no = ({"description": word, "content": _content(Status)} for word in ("Yes.", "No."))
    return {"summary": summary, "responses": {"200": yes, "503": no}}


def _of_place(summary: str) -> Json:
    return {"summary": summary, "responses": {"204": {"description": "Done."}, **_refusals({429, 503})}}


def _refusals(statuses: set[int]) -> Json:
    responses = {}
    for status in sorted(statuses):
        cases = [f"`{code}`: {code.meaning}." for code in ErrorCode if code.status == status]
        responses[str(status)] = {"description": " ".join(cases), "content": _content(ErrorAnswer)}
    return responses


def _content(kind: type) -> Json:
    return {"application/json": {"schema": _reference(kind)}}


def _reference(kind: type) -> Json:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _answer_schemas() -> Json:
    return msgspec.json.schema_components(_ANSWERS, ref_template=_REFERENCE)[1]


def _request_schemas() -> Json:
    """The schemas of the request models, with the fields of `fields` beside their own. Others are ignored."""
    models = [(model, "validation") for model in _REQUESTS]
    schemas: Json = models_json_schema(models, ref_template="#/components/schemas/{model}")[1]["$defs"]  # type: ignore[arg-type]
    for model in _REQUESTS:
        schema, rows = schemas[model.__name__], ROWS[model.place]  # type: ignore[attr-defined]
        schema["properties"] |= {name: row.schema() for name, row in rows.items()}
    schemas["ChatMessage"]["required"] = ["role", "content"]
    for name in ("ChatRequest", "CompletionRequest"):
        schemas[name]["allOf"] = [_needs("stream_options", {"type": "object"}, "stream")]
    schemas["ChatRequest"]["allOf"].append(_needs("top_logprobs", {"type": "integer", "minimum": 1}, "logprobs"))
    return schemas


def _needs(field: str, value: Json, other: str) -> Json:
    """`field`, if it has such a value, is allowed only when `other` is true."""
    return {
        "if": {"properties": {field: value}, "required": [field]},
        "then": {"properties": {other: {"const": True}}, "required": [other]},
    }
