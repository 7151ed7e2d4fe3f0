"""Builds the document at /openapi.json from the schemas with which this server validates requests and encodes answers.

`app` builds it once. Workers validate the bodies (ADR 6), and answers are encoded from structs. So FastAPI cannot
derive the document from signatures. This module builds it from the same pydantic models, table of fields, structs and
error codes that the server uses, and FastAPI serves it. Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from conveyor_engine import __version__
from conveyor_engine.errors import ErrorCode
from conveyor_engine.serving.http.info import Info
from conveyor_engine.serving.http.open_inference import (
    InferAnswer,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
    infer,
)
from conveyor_engine.serving.http.status import Status, Version
from conveyor_engine.serving.http.task_paths import TaskPath, TaskPaths, load_task_paths
from conveyor_engine.serving.preparing.open_inference import (
    InferInput,
    InferOutput,
    InferParameters,
    InferRequest,
    TensorParameters,
)
from conveyor_protocol.answer_codes import ERROR_FORMS, ErrorDetails, find_error_form
from conveyor_protocol.engine_pages import (
    ADAPTERS_PATH,
    LOAD_PATH,
    PLACE_PATH,
    STEPS_PATH,
    USAGE_PATH,
    AdapterState,
    AdapterStates,
    Load,
    Model,
    ModelList,
    StepRecord,
    Steps,
)
from conveyor_protocol.open_inference import LIVE_PATH, READY_PATH, SERVER_PATH, build_path_parameters
from conveyor_protocol.request_headers import (
    RECEIPT_HEADER,
    REQUEST_ID_HEADER,
    REQUEST_TIMEOUT_HEADER,
    TIMEOUT_SECONDS_MIN,
)
from conveyor_protocol.usage import UsedTokens

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_TEMPLATE = "#/components/schemas/{model}"  # the same reference, with pydantic's placeholder
_ANSWERS = (
    *(form.answer for form in ERROR_FORMS), ErrorCode, ModelList, Model, Status, Version, Load, UsedTokens, Info,
    AdapterState,
    StepRecord,
    ServerMetadata, Live, Ready, ModelReady, ModelMetadata, InferAnswer,
)  # fmt: skip
_MODELS_OF_V2 = ("/v2/models/{model}/versions/{version}", "/v2/models/{model}")
_INFER = TaskPath("/v2/models/{model}/infer", infer, "Computes a batch of tensors.", InferRequest, InferAnswer)
_TOKENIZER: Json = {
    "type": "object",
    "properties": {"tokenizer_class": {"type": "string"}, "chat_template": {"type": "string"}},
    "required": ["tokenizer_class"],
}
_HEADERS = [
    {
        "name": REQUEST_ID_HEADER,
        "in": "header",
        "description": "1 to 128 visible ASCII characters. The response has another id if this one has other ones.",
        "schema": {"type": "string"},
    },
    {
        "name": REQUEST_TIMEOUT_HEADER,
        "in": "header",
        "schema": {"type": "number", "minimum": TIMEOUT_SECONDS_MIN},
        "example": 30,
    },
    {
        "name": RECEIPT_HEADER,
        "in": "header",
        "description": "With `true`, `usage` has a receipt. Answers without `usage` have it in this header.",
        "schema": {"type": "string"},
    },
]


def build_document() -> Json:
    """Return the document in OpenAPI 3.1, whose schemas are JSON Schema 2020-12."""
    tasks = tuple(load_task_paths().values())
    paths: Json = {}
    for path, method, operation in _operations(tasks):
        paths.setdefault(path, {})[method] = operation
    taken, given = _request_schemas(tasks), _answer_schemas(tasks)
    assert not taken.keys() & given.keys(), "each name has one schema"
    return {
        "openapi": "3.1.0",
        "info": {"title": "Conveyor engine", "version": __version__},
        "paths": paths,
        "components": {"schemas": dict(sorted((taken | given).items()))},
    }


def _operations(tasks: Sequence[TaskPaths]) -> Iterator[tuple[str, str, Json]]:
    for of_task in tasks:
        for row in of_task.paths:
            yield row.path, "post", _task_path(row)
    for base in _MODELS_OF_V2:
        yield f"{base}/infer", "post", _task_path(replace(_INFER, path=f"{base}/infer"))
        ready = _of_model(base, "Whether the model accepts requests.", ModelReady)
        ready["responses"]["503"] = {"description": "No.", "content": _content(ModelReady)}
        yield f"{base}/ready", "get", ready
        yield base, "get", _of_model(base, "Describes the model and its tensors.", ModelMetadata)
    yield SERVER_PATH, "get", _page("Describes this server.", ServerMetadata)
    yield LIVE_PATH, "get", _probe("Whether the engine is alive, also while it loads.", Live)
    yield READY_PATH, "get", _probe("Whether requests are accepted.", Ready)
    yield "/v1/models", "get", _page("Lists the model.", ModelList)
    one = _page("Describes the model, if the id is the model's. Ids may contain slashes.", Model, (404,))
    one["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    yield "/v1/models/{model}", "get", one
    for base in ("", "/v1"):
        for name in ("health", "ping"):
            yield f"{base}/{name}", "get", _probe("Whether requests are accepted.")
        yield f"{base}/version", "get", _page("The engine's version.", Version)
    yield "/livez", "get", _probe("Whether the engine is alive, also while it loads.")
    yield "/readyz", "get", _probe("Whether requests are accepted.")
    described = {"description": "As in tokenizer_config.json.", "content": {"application/json": {"schema": _TOKENIZER}}}
    yield "/tokenizer_info", "get", {
        "summary": "Describes the model's tokenizer.", "responses": {"200": described, **_refusals({400})},
    }  # fmt: skip
    page = _page("Describes a model that embeds, ranks or classifies texts.", Info)
    page["responses"] |= _refusals({400, 503}, "/info")
    yield "/info", "get", page
    yield LOAD_PATH, "get", _page("The numbers of running and waiting requests.", Load)
    yield ADAPTERS_PATH, "get", _page("The state of each LoRA adapter that may come and go.", AdapterStates)
    yield STEPS_PATH, "get", _page("The engine's last steps, the oldest first.", Steps)
    yield PLACE_PATH, "get", _of_place("Reserves a place for a gateway's next request, as soon as one is free.")
    yield PLACE_PATH, "delete", _of_place("Releases a reserved place.")
    used = _page("The tokens that a request has used, by the key that its gateway chose.", UsedTokens, (404,))
    used["parameters"] = [{"name": "key", "in": "query", "required": True, "schema": {"type": "string"}}]
    yield USAGE_PATH, "get", used
    metrics = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    yield "/metrics", "get", {"summary": "Metrics.", "responses": {"200": metrics}}


def _task_path(row: TaskPath) -> Json:
    """Describe a path of one task. An engine with another task responds with 400 `wrong_task`."""
    statuses = {code.status for code in ErrorCode}
    content, description = {"application/json": {"schema": _answer_schema(row.whole)}}, "Whole."
    if row.chunk is not None:
        content |= _events([row.chunk], row.path)
        each = f"each `data: ` and a {row.chunk.__name__}"
        description = f"Whole, or with `stream` server-sent events, {each}, the last `data: [DONE]`."
    elif row.events:
        content |= _events(row.events, row.path)
        description = (
            "Whole, or with `stream` server-sent events, each `event: ` and its `type`, `data: ` and the object."
        )
    if row.is_bytes_too:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if row.is_text_too:
        content["text/plain"] = {"schema": {"type": "string"}}
    taken = ({} if row.request is None else _content(row.request)) | _form(row.form)
    return {
        "summary": row.summary,
        "parameters": [*build_path_parameters(row.path), *_HEADERS],
        "requestBody": {"required": True, "content": taken},
        "responses": {"200": {"description": description, "content": content}, **_refusals(statuses, row.path)},
    }


def _events(kinds: Iterable[type], path: str) -> Json:
    """Describe a stream of events with OpenAPI 3.2's `itemSchema`, as FastAPI does in documents of OpenAPI 3.1.

    The last event of a stream that fails is an error.
    """
    either = {"oneOf": list(map(_reference, [*kinds, find_error_form(path).answer]))}
    content = {"contentMediaType": "application/json", "contentSchema": either}
    data = {"type": "string", "anyOf": [content, {"const": "[DONE]"}]}
    event = {"type": "object", "properties": {"data": data, "event": {"type": "string"}}, "required": ["data"]}
    return {"text/event-stream": {"itemSchema": event}}


def _of_model(path: str, summary: str, answer: type) -> Json:
    """Describe a GET path of the Open Inference Protocol about the model."""
    page = _page(summary, answer)
    refusals = _refusals({400, 404, 503}, path)
    return page | {"parameters": build_path_parameters(path), "responses": page["responses"] | refusals}


def _page(summary: str, answer: Any, refusals: tuple[int, ...] = ()) -> Json:
    return {
        "summary": summary,
        "responses": {"200": {"description": summary, "content": _content(answer)}, **_refusals(set(refusals))},
    }


def _probe(summary: str, answer: type = Status) -> Json:
    yes, no = ({"description": word, "content": _content(answer)} for word in ("Yes.", "No."))
    return {"summary": summary, "responses": {"200": yes, "503": no}}


def _of_place(summary: str) -> Json:
    return {"summary": summary, "responses": {"204": {"description": "Done."}, **_refusals({400, 429, 503})}}


def _refusals(statuses: set[int], path: str = "") -> Json:
    responses, form = {}, find_error_form(path).answer
    for status in sorted(statuses):
        cases = [f"`{code}`: {code.meaning}." for code in ErrorCode if code.status == status]
        responses[str(status)] = {"description": " ".join(cases), "content": _content(form)}
    return responses


def _content(kind: Any) -> Json:
    """Return the content of a page. `kind`: a class, or another type that msgspec knows."""
    return {"application/json": {"schema": _reference(kind) if isinstance(kind, type) else _answer_schema(kind)}}


def _form(kind: type | None) -> Json:
    return {} if kind is None else {"multipart/form-data": {"schema": _reference(kind)}}


def _answer_schema(kind: Any) -> Json:
    """Return the schema of an answer. `kind`: a struct, a list of structs, or a tuple of alternatives."""
    if isinstance(kind, tuple):
        return {"anyOf": list(map(_answer_schema, kind))}
    return msgspec.json.schema_components([kind], ref_template=_REFERENCE)[0][0]


def _reference(kind: type) -> Json:
    return {"$ref": _REFERENCE.format(name=kind.__name__)}


def _answer_schemas(tasks: Sequence[TaskPaths]) -> Json:
    of_tasks = {
        kind
        for of_task in tasks
        for row in of_task.paths
        for kind in (*(row.whole if isinstance(row.whole, tuple) else (row.whole,)), row.chunk, *row.events)
        if kind
    }
    schemas: Json = msgspec.json.schema_components((*_ANSWERS, *of_tasks), ref_template=_REFERENCE)[1]
    schemas[ErrorDetails.__name__]["properties"]["code"] = _reference(ErrorCode)
    return schemas


def _request_schemas(tasks: Sequence[TaskPaths]) -> Json:
    """Return the schemas of the request models, with each model's `rows()` added to its own fields.

    The schemas allow further fields, which the server ignores.
    """
    rows = [row for of_task in tasks for row in of_task.paths]
    bodies = [each for row in rows for each in (row.request, row.form) if each is not None]
    models = [*bodies, *(model for of_task in tasks for model in of_task.objects)]
    models += [InferRequest, InferInput, InferOutput, InferParameters, TensorParameters]
    schemas: Json = models_json_schema([(model, "validation") for model in models], ref_template=_TEMPLATE)[1]["$defs"]
    for model in models:
        schemas[model.__name__]["properties"] |= {name: row.schema() for name, row in model.rows().items()}
    for of_task in tasks:
        of_task.refine(schemas)
    # `OneOf` describes its model for other values in place, and pydantic keeps that model's own schema.
    text, own = msgspec.json.encode(schemas).decode(), {model.__name__ for model in models}
    return {name: each for name, each in schemas.items() if name in own or f'/{name}"' in text}
