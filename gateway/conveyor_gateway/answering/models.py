"""`/v1/models`: of one service, or of the root, where each model has the name that leads to it.

Called by `listening`; a service without engines has its model all the same.
"""

from typing import Literal, TypedDict

from conveyor_gateway.errors import Code, NotFound
from conveyor_gateway.routing import Route, find_model, model_id
from conveyor_gateway.watching.catalog import Directory, Service


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


def find_model_page(route: Route, directory: Directory) -> Model:
    """The model that the route names. Raises NotFound."""
    if route.service is None:
        return build_model(find_model(route.model, directory), route.model)
    service = directory.services[route.service]
    if route.model != service.model_name:
        raise NotFound(f"{service.key} serves the model {service.model_name!r}", Code.MODEL_NOT_FOUND, "model")
    return build_model(service, route.model)
