"""Serves `/v1/models` for one service, and for the root, where each model has the name that selects its service.

Called by `listening`. Each LoRA adapter is a model of its own, with `parent`. A service without engines is listed too.
The root shows the services with `listed: true`, or all (`--root-models`), and to a proven caller also those that it was
granted. The response for a hidden model is the same as for one that does not exist. The root's list may have many
megabytes, so it is built piece by piece while the client reads. A client's memory cost therefore does not depend on the
number of services.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final

import msgspec
from aiohttp.web import BaseRequest, StreamResponse

from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.responses import send_pieces
from conveyor_gateway.routing import Route, build_no_model, model_id
from conveyor_gateway.watching.catalog import Directory, NamedModel, Service, join_names
from conveyor_gateway.watching.view import View
from conveyor_protocol.engine_pages import Model, ModelList

_MODELS_PER_PIECE: Final = 100


def build_model(service: Service, model: str, parent: str | None = None) -> Model:
    """Describe a model. The fields do not reveal the model's location."""
    return {
        "id": model,
        "object": "model",
        "created": service.created_unix,
        "owned_by": service.namespace,
        "root": model,
        "parent": parent,
        "max_model_len": service.max_model_len,
    }


def build_model_list(service: Service) -> ModelList:
    """Return the list with the model of one service and its adapters, under the names that its engines use."""
    name = service.model_name
    adapters = [build_model(service, join_names(name, adapter), name) for adapter in service.adapters]
    return {"object": "list", "data": [build_model(service, name), *adapters]}


async def send_model_list(request: BaseRequest, view: View, lists_all: bool) -> StreamResponse:
    """Send the list of the root's models. Returns when the client has received it or has left."""
    return await send_pieces(request, "application/json", encode_model_list(view, lists_all))


def encode_model_list(view: View, lists_all: bool) -> Iterator[bytes]:
    """Yield the JSON of a ModelList with the names at the root. Services may be added and removed meanwhile.

    A proven caller's list also has the services that it was granted.
    """
    comma, last, directory = b"", "", view.directory
    yield b'{"object":"list","data":['
    while services := directory.list_after(last, _MODELS_PER_PIECE, lists_all or view.caller is not None):
        seen = (service for service in services if view.lists(service, lists_all))
        models = (model for service in seen for model in _build_models(service, directory))
        while some := list(islice(models, _MODELS_PER_PIECE)):  # a service may have many adapters
            yield comma + msgspec.json.encode(some)[1:-1]
            comma = b","
        yield b" "  # a pause for other requests, also if the client sees none of these services
        last = services[-1].key
    yield b"]}"


def _build_models(service: Service, directory: Directory) -> Iterator[Model]:
    """Yield the model and its adapters with the names at the root."""
    parent = model_id(NamedModel(service), directory)
    yield build_model(service, parent)
    for adapter in service.adapters:
        yield build_model(service, model_id(NamedModel(service, adapter), directory), parent)


def find_model_page(route: Route, view: View, lists_all: bool) -> Model:
    """Return the model that the route names. Raises GatewayError."""
    if route.service is None:
        found = view.find_model(route.model)
        if found is None or not view.lists(found.service, lists_all):
            raise build_no_model(route.model, view)
        parent = route.model.removesuffix(join_names("", found.adapter)) if found.adapter else None
        return build_model(found.service, route.model, parent)
    service = view.directory.services[route.service]
    for model in build_model_list(service)["data"]:
        if model["id"] == route.model:
            return model
    raise GatewayError(f"{service.key} serves the model {service.model_name!r}", Code.MODEL_NOT_FOUND, "model")
