"""Answers that the gateway makes itself: JSON, errors in OpenAI's form, the list of models.

Used by `listening`, `answering` and `relaying`. Knows no queues and no engines.
"""

import json
from typing import Any, Literal, TypedDict

from aiohttp.web import BaseRequest, Response

from conveyor_gateway.errors import Code, GatewayError, Unavailable
from conveyor_gateway.routing import model_id
from conveyor_gateway.watching.catalog import Directory, Service
from conveyor_process.request_headers import REQUEST_ID_HEADER, choose_request_id


def find_request_id(request: BaseRequest) -> str:
    return choose_request_id(request.headers.get(REQUEST_ID_HEADER, ""))


def build_json(content: Any, request_id: str, status: int = 200) -> Response:
    headers = {REQUEST_ID_HEADER: request_id, "Content-Type": "application/json"}
    return Response(status=status, headers=headers, body=json.dumps(content).encode())


def build_error(error: GatewayError, request_id: str) -> Response:
    answer = build_json(error.to_json(), request_id, error.status)
    answer.headers.update(error.headers)
    return answer


def build_stopping() -> GatewayError:
    return Unavailable("the gateway is stopping; try again", Code.STOPPING)


def build_error_event(error: GatewayError) -> bytes:
    """The last event of a stream that cannot go on; OpenAI's clients raise it as an APIError."""
    return b"data: " + json.dumps(error.to_json()).encode() + b"\n\n"


class Model(TypedDict):
    """As OpenAI describes one, and its context as vLLM does."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


def build_model(service: Service, model: str) -> Model:
    return {
        "id": model,
        "object": "model",
        "created": service.created_unix,
        "owned_by": service.namespace,
        "max_model_len": service.max_model_len,
    }


def build_model_list(service: str | None, directory: Directory) -> ModelList:
    """The model of one service under the name that its engines know, or all models under names that the root knows."""
    if service is not None:
        only = directory.services[service]
        return {"object": "list", "data": [build_model(only, only.model_name)]}
    services = [directory.services[key] for key in sorted(directory.services)]
    return {"object": "list", "data": [build_model(each, model_id(each, directory)) for each in services]}
