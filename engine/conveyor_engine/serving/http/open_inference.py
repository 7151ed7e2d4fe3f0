"""Serves the Open Inference Protocol (version 2, REST): server, model, and POST /v2/models/{model}/infer.

Every engine serves these paths. The model's metadata and `infer` need a task whose models take tensors. The `serving`
module of such a task has an `Inference`. `preparing.open_inference` validates the bodies.
"""

import math
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from conveyor_engine import __version__, registry
from conveyor_engine.errors import ErrorCode, GenerationFailed, InvalidRequest, Unavailable, UnknownModel
from conveyor_engine.serving.http.app_state import AppState, app_state, model_facts
from conveyor_engine.serving.http.engine_response import Opened, open_request
from conveyor_engine.serving.http.one_step import OneStepResponse
from conveyor_engine.serving.http.status import is_alive, is_ready
from conveyor_engine.serving.http.task_paths import Inference, TaskPaths, name_paths
from conveyor_engine.serving.preparing.open_inference import PreparedInference
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.tensors import ARRAY_CODES, Datatype, Tensor, Tensors, TensorSpec, decode_elements
from conveyor_protocol.open_inference import JSON_LENGTH_HEADER, MODEL_VERSION, build_server_metadata

_PIECE_ELEMENTS: Final = 4096


class ServerMetadata(msgspec.Struct):
    """The server's name and version, and the protocol's extensions that it supports."""

    name: str
    version: str
    extensions: list[str]


class Live(msgspec.Struct):
    """Whether the server is alive."""

    live: bool


class Ready(msgspec.Struct):
    """Whether the server accepts requests."""

    ready: bool


class ModelReady(msgspec.Struct):
    """Whether the model accepts requests."""

    name: str
    ready: bool


class TensorMetadata(msgspec.Struct):
    """A tensor of the model. Its first dimension is the batch; -1 stands for any length."""

    name: str
    datatype: Datatype
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """The model and its tensors."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class OutputParameters(msgspec.Struct):
    """The size of an output's binary data, which follows the JSON in the order of the outputs."""

    binary_data_size: int


class OutputTensor(msgspec.Struct, omit_defaults=True):
    """An output for all items, in their order. Its data are flat and row-major, or binary after the JSON."""

    name: str
    datatype: Datatype
    shape: list[int]
    parameters: OutputParameters | None = None
    data: list[Any] | None = None


class InferAnswer(msgspec.Struct, omit_defaults=True):
    """The response to a batch."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None


def _json(content: msgspec.Struct | dict[str, object], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def get_server(_: Request) -> Response:
    """Respond to GET /v2."""
    return _json(build_server_metadata(__version__))


async def get_live(request: Request) -> Response:
    """Respond to GET /v2/health/live as /livez does."""
    state = app_state(request)
    alive = is_alive(state)
    return _json(Live(alive), 200 if alive else 503)


async def get_ready(request: Request) -> Response:
    """Respond to GET /v2/health/ready as /readyz does."""
    ready = is_ready(app_state(request))
    return _json(Ready(ready), 200 if ready else 503)


async def get_model_ready(request: Request) -> Response:
    """Respond to GET /v2/models/{model}/ready. Raises UnknownModel."""
    state = app_state(request)
    name, ready = _check_model(state, request), is_ready(state)
    return _json(ModelReady(name, ready), 200 if ready else 503)


async def get_model(request: Request) -> Response:
    """Respond to GET /v2/models/{model}. Raises UnknownModel, InvalidRequest or Unavailable.

    Raises HTTPException (405) for GET .../infer.
    """
    state = app_state(request)
    given = request.path_params["model"]
    if given.endswith("/infer") and given not in state.model.names:  # GET .../infer arrives here: ids may have slashes
        raise HTTPException(405, headers={"Allow": "POST"})
    name, facts = _check_model(state, request), model_facts(state)
    signature = _find_inference(facts).read_signature(facts)
    inputs, outputs = (list(map(_describe, specs)) for specs in (signature.inputs, signature.outputs))
    return _json(ModelMetadata(name, [MODEL_VERSION], f"conveyor_{facts.task}", inputs, outputs))


def _describe(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype, spec.batch_shape)


async def infer(request: Request) -> "InferResponse":
    """Respond to POST /v2/models/{model}/infer.

    Each item is a separate engine request, so items of several requests can share a batch.
    """
    state = app_state(request)
    _check_model(state, request)
    inference = _find_inference(model_facts(state))
    return InferResponse(await open_request(request, inference.kind), inference)


def _check_model(state: AppState, request: Request) -> str:
    """Return the name of the model in the path. Raises UnknownModel."""
    name: str = request.path_params["model"]
    state.model.find_adapter(name)
    version = request.path_params.get("version", MODEL_VERSION)
    if version != MODEL_VERSION:
        raise UnknownModel(f"the model has only version {MODEL_VERSION!r}, not {version[:100]!r}", param="version")
    return name


def _find_inference(facts: ModelFacts) -> Inference:
    of_task: TaskPaths = registry.load(facts.task, "serving")
    if of_task.inference is None:
        about = registry.load_about(facts.task)
        message = f"this engine's model {about.does} and takes no tensors; it answers {name_paths(facts.task)}"
        raise InvalidRequest(message, code=ErrorCode.WRONG_TASK)
    return of_task.inference


class InferResponse(OneStepResponse):
    """Responds with the outputs of all items, or with one error."""

    def __init__(self, opened: Opened, inference: Inference) -> None:
        assert isinstance(opened.prepared, PreparedInference)
        super().__init__(opened, opened.prepared)
        self._prepared, self._inference = opened.prepared, inference

    async def _send_payloads(self, payloads: Sequence[bytes], send: Send) -> None:
        facts = self._state.engine.facts
        if facts is None:
            raise Unavailable("the engine has stopped")
        items = [self._inference.read_outputs(facts, payload) for payload in payloads]
        outputs = [_join(requested.name, items, requested.is_binary) for requested in self._prepared.outputs]
        answer = InferAnswer(
            self._state.model.name, MODEL_VERSION, [output for output, _ in outputs], self._prepared.own_id
        )
        binary = [data for output, data in outputs if output.parameters is not None]
        if not binary:
            await self._send_json(_write(answer, outputs), send)
            return
        head = b"".join(_write(answer, outputs))
        headers = [
            (b"content-type", b"application/octet-stream"),
            (JSON_LENGTH_HEADER.lower().encode(), b"%d" % len(head)),
        ]
        await self._send_body(chain([head], *binary), headers, send)


Joined = tuple[OutputTensor, list[bytes]]
"""An output without its data, and the data for each item."""


def _join(name: str, items: Sequence[Tensors], is_binary: bool) -> Joined:
    """Join one output of all items.

    Raises GenerationFailed if the items' shapes differ, or if JSON is requested and cannot represent the values.
    """
    tensors = [item[name] for item in items]
    first = tensors[0]
    if any(tensor.shape != first.shape for tensor in tensors):
        raise GenerationFailed(f"the items' outputs {name!r} differ in shape: send each item in a separate request")
    shape, data = [len(tensors), *first.shape], [tensor.data for tensor in tensors]
    parameters = OutputParameters(sum(map(len, data))) if is_binary else None
    if not is_binary:
        _check_json(name, tensors)
    return OutputTensor(name, first.datatype, shape, parameters), data


def _check_json(name: str, tensors: Sequence[Tensor]) -> None:
    datatype = tensors[0].datatype
    instead = "request binary data (`binary_data_output`)"
    if datatype == "BF16":
        raise GenerationFailed(f"the output {name!r} has datatype BF16, which JSON cannot represent: {instead}")
    if datatype.startswith("FP"):
        for tensor in tensors:
            if not all(map(math.isfinite, _read_elements(datatype, tensor.data))):
                message = f"the output {name!r} has NaN or infinity, which JSON cannot represent: {instead}"
                raise GenerationFailed(message)


def _read_elements(datatype: Datatype, data: bytes) -> Sequence[Any]:
    """Return the elements as values for JSON."""
    if datatype == "BYTES":
        return [element.decode(errors="replace") for element in decode_elements(data)]
    if datatype == "BOOL":
        return list(map(bool, data))
    if datatype == "FP16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    return array(ARRAY_CODES[datatype], data)


def _write(answer: InferAnswer, outputs: Sequence[Joined]) -> Iterator[bytes]:
    """Yield the JSON in pieces, so that the caller can send it without keeping it whole in memory."""
    begin, end = msgspec.json.encode(msgspec.structs.replace(answer, outputs=[])).split(b'"outputs":[]')
    yield begin + b'"outputs":['
    for number, (output, data) in enumerate(outputs):
        if number:
            yield b","
        if output.parameters is not None:
            yield msgspec.json.encode(output)
        else:
            yield msgspec.json.encode(msgspec.structs.replace(output, data=[])).removesuffix(b"]}")
            yield from _write_elements(output.datatype, data)
            yield b"]}"
    yield b"]" + end


def _write_elements(datatype: Datatype, data: Sequence[bytes]) -> Iterator[bytes]:
    comma = b""
    for of_item in data:
        elements = _read_elements(datatype, of_item)
        for start in range(0, len(elements), _PIECE_ELEMENTS):
            yield comma + msgspec.json.encode(list(elements[start : start + _PIECE_ELEMENTS]))[1:-1]
            comma = b","
