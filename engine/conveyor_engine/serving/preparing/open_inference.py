"""Reads bodies of the Open Inference Protocol (version 2): JSON, followed by binary data. Runs in worker processes.

A task whose model takes tensors calls `prepare_inference` with its signature, and makes an engine request from the
tensors of each item. A body is a batch: the first dimension of each input is the number of items. Items of different
bodies share the engine's batches. All sizes in a body are compared with the length of its data before anything is
built.
"""

import math
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Final

import msgspec
from pydantic import Field

from conveyor_engine.errors import ErrorCode, InvalidRequest
from conveyor_engine.serving.preparing.jobs import ServedModel, check_num_inputs, parse_body
from conveyor_engine.serving.preparing.prompts import PreparedPrompts, Prompt
from conveyor_engine.serving.preparing.schemas import ModelFields, Object
from conveyor_engine.wire.tensors import (
    ARRAY_CODES,
    DATATYPES,
    Datatype,
    Signature,
    Tensor,
    TensorSpec,
    decode_elements,
    encode_elements,
    find_element_bytes,
)
from conveyor_engine.wire.worker import Job
from conveyor_protocol.open_inference import JSON_LENGTH_HEADER

TENSORS_MAX: Final = 64  # of one body
_DIMENSIONS_MAX: Final = 16
_ID_CHARACTERS_MAX: Final = 1024
_SHARED_MEMORY: Final = "shared_memory_region"

Dimension = Annotated[int, Field(ge=0, lt=2**31)]


class InferParameters(Object):
    """Parameters that change the format of the response. Others are ignored."""

    binary_data_output: bool | None = None
    """Whether outputs without their own `binary_data` are returned as binary data."""
    sequence_id: int | str | None = None
    """Rejected unless it is 0 or empty: models here keep no state between requests."""


class TensorParameters(Object):
    """Where the data of an input is, or in which format an output is returned."""

    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    """Number of bytes of the input's data after the JSON, where inputs follow each other in order."""
    binary_data: bool | None = None
    """Whether to return an output as binary data."""
    classification: int | None = None
    """Rejected: outputs are always returned in full."""
    shared_memory_region: str | None = None
    """Rejected: clients and engines share no memory."""


class InferInput(Object):
    """One tensor with a batch of items. Its first dimension is the number of items."""

    name: str
    shape: Annotated[list[Dimension], Field(min_length=1, max_length=_DIMENSIONS_MAX)]
    datatype: str
    parameters: TensorParameters | None = None
    data: list[Any] | None = None
    """The elements in row-major order, flat or nested."""


class InferOutput(Object):
    """A tensor to return."""

    name: str
    parameters: TensorParameters | None = None


class InferRequest(ModelFields):
    """POST /v2/models/{model}/infer."""

    id: Annotated[str, Field(max_length=_ID_CHARACTERS_MAX)] | None = None
    """The response repeats it."""
    parameters: InferParameters | None = None
    inputs: Annotated[list[InferInput], Field(min_length=1, max_length=TENSORS_MAX)]
    outputs: Annotated[list[InferOutput], Field(max_length=TENSORS_MAX)] | None = None
    """The tensors to return; default: all outputs of the model."""


class AskedOutput(msgspec.Struct, frozen=True, array_like=True):
    """An output to return."""

    name: str
    is_binary: bool


class PreparedInference(PreparedPrompts, frozen=True, kw_only=True, array_like=True):
    """A valid request, with a prompt for each item, in the order of the items."""

    own_id: str | None  # the id that the client sent
    outputs: list[AskedOutput]


def prepare_inference(
    model: ServedModel,
    job: Job,
    signature: Signature,
    make_prompt: Callable[[dict[str, Tensor], str], Prompt],
    items_max: int | None = None,
) -> PreparedInference:
    """Make an engine request for each item of a body.

    make_prompt: called with the tensors of an item and the item's name for errors.
    items_max: the most items in a body; None: the task has no limit of its own.

    Raises InvalidRequest or UnknownModel.
    """
    size = len(job.body) if job.json_bytes is None else job.json_bytes
    if size > len(job.body):
        message = f"the JSON has {size} bytes by its header, but the body has {len(job.body)}"
        raise InvalidRequest(message, param=JSON_LENGTH_HEADER)
    fields = parse_body(model, InferRequest, job.body[:size])
    if fields.parameters is not None and fields.parameters.sequence_id:
        raise _unsupported("parameters.sequence_id", "leave it out: models here keep nothing between requests")
    outputs = _choose_outputs(fields, signature)
    tensors = _read_inputs(fields.inputs, memoryview(job.body)[size:], signature)
    numbers = {name: shape[0] for name, (_, shape, _) in tensors.items()}
    number = next(iter(numbers.values()))
    if set(numbers.values()) != {number}:
        each = ", ".join(f"{name} {count}" for name, count in numbers.items())
        raise InvalidRequest(f"inputs must have the same first dimension, the number of items: {each}", param="inputs")
    if number == 0:
        raise InvalidRequest("inputs must have an item: their first dimension is 0", param="inputs")
    check_num_inputs(number, "inputs")
    if items_max is not None and number > items_max:
        raise InvalidRequest(f"inputs must have at most {items_max} items, not {number}", param="inputs")
    items = zip(*(_split(*tensor) for tensor in tensors.values()), strict=True)
    prompts = [
        make_prompt(dict(zip(tensors, item, strict=True)), "inputs" if number == 1 else f"item {index}")
        for index, item in enumerate(items)
    ]
    return PreparedInference.of("infer", prompts, job, fields, "inputs", own_id=fields.id, outputs=outputs)


def _choose_outputs(fields: InferRequest, signature: Signature) -> list[AskedOutput]:
    known = [spec.name for spec in signature.outputs]
    binary = bool(fields.parameters and fields.parameters.binary_data_output)
    if not fields.outputs:
        return [AskedOutput(name, binary) for name in known]
    chosen: dict[str, AskedOutput] = {}
    for index, output in enumerate(fields.outputs):
        param = f"outputs[{index}]"
        if output.name not in known:
            there_are = f"{param}.name is {output.name[:100]!r}; this model has {', '.join(known)}"
            raise InvalidRequest(there_are, param=f"{param}.name")
        if output.name in chosen:
            raise InvalidRequest(f"{param}.name is {output.name!r}, which appears twice", param=f"{param}.name")
        parameters = output.parameters or TensorParameters()
        if parameters.classification:
            raise _unsupported(f"{param}.parameters.classification", "leave it out, and take the largest yourself")
        _refuse_shared_memory(parameters, param)
        of_output = parameters.binary_data
        chosen[output.name] = AskedOutput(output.name, binary if of_output is None else of_output)
    return list(chosen.values())


Batch = tuple[Datatype, tuple[int, ...], bytes]
"""An input's datatype, its shape including the number of items, and its data."""


def _read_inputs(inputs: Sequence[InferInput], rest: memoryview, signature: Signature) -> dict[str, Batch]:
    known = {spec.name: spec for spec in signature.inputs}
    tensors: dict[str, Batch] = {}
    lengths: dict[str, int] = {}
    position = 0
    for index, given in enumerate(inputs):
        param = f"inputs[{index}]"
        spec = known.get(given.name)
        if spec is None:
            there_are = f"{param}.name is {given.name[:100]!r}; this model takes {', '.join(known)}"
            raise InvalidRequest(there_are, param=f"{param}.name")
        if given.name in tensors:
            raise InvalidRequest(f"{param}.name is {given.name!r}, which appears twice", param=f"{param}.name")
        _check_shape(given, spec, signature, lengths, param)
        parameters = given.parameters or TensorParameters()
        _refuse_shared_memory(parameters, param)
        size = parameters.binary_data_size
        if (size is None) == (given.data is None):
            raise InvalidRequest(f"{param} must have either data or parameters.binary_data_size", param=param)
        if size is not None:
            if position + size > len(rest):
                message = (
                    f"{param} has binary_data_size {size}, but the body has only {len(rest) - position} bytes left"
                )
                raise InvalidRequest(message, param=f"{param}.parameters.binary_data_size")
            data = _check_binary(spec.datatype, given.shape, bytes(rest[position : position + size]), param)
            position += size
        else:
            data = _read_json(spec.datatype, given.shape, given.data or [], f"{param}.data")
        tensors[given.name] = spec.datatype, tuple(given.shape), data
    if position != len(rest):
        message = f"{len(rest) - position} bytes after the JSON do not belong to an input"
        raise InvalidRequest(message, param=JSON_LENGTH_HEADER)
    if missing := [spec.name for spec in signature.inputs if not spec.is_optional and spec.name not in tensors]:
        raise InvalidRequest(f"inputs lack {', '.join(missing)}", param="inputs")
    return tensors


def _check_shape(
    given: InferInput, spec: TensorSpec, signature: Signature, lengths: dict[str, int], param: str
) -> None:
    """Raise InvalidRequest if the input does not match the signature or the lengths of other inputs.

    Called before any data is read.
    """
    if given.datatype != spec.datatype:
        known = f"{given.name} has {spec.datatype}"
        if given.datatype not in DATATYPES:
            known = f"the protocol has {', '.join(DATATYPES)}, and {known}"
        raise InvalidRequest(f"{param}.datatype is {given.datatype[:20]!r}: {known}", param=f"{param}.datatype")
    known_lengths = dict(lengths)
    if not signature.bind(spec, given.shape[1:], lengths):
        dimensions = ", ".join(["batch", *map(str, spec.shape)])
        message = f"{param}.shape is {given.shape}, but {given.name} has [{dimensions}]"
        for name in (size for size in spec.shape if isinstance(size, str)):
            least, most = signature.lengths[name]
            message += f"; {name} is {known_lengths.get(name, f'{least} to {most}')}"
        raise InvalidRequest(message, param=f"{param}.shape")


def _check_binary(datatype: Datatype, shape: Sequence[int], data: bytes, param: str) -> bytes:
    number, each = math.prod(shape), find_element_bytes(datatype)
    if each is not None:
        if number * each != len(data):
            message = f"{param} has {len(data)} bytes, but its shape {list(shape)} of {datatype} needs {number * each}"
            raise InvalidRequest(message, param=f"{param}.parameters.binary_data_size")
        return data
    try:
        found = sum(1 for _ in decode_elements(data))
    except ValueError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    if found != number:
        raise InvalidRequest(f"{param} has {found} elements, but its shape {list(shape)} needs {number}", param=param)
    return data


def _read_json(datatype: Datatype, shape: Sequence[int], data: list[Any], param: str) -> bytes:
    flat = _flatten(data, shape, param)
    kinds = set(map(type, flat))
    if datatype == "BYTES":
        if kinds - {str}:
            raise InvalidRequest(f"{param} must contain only strings", param=param)
        try:
            return encode_elements([element.encode() for element in flat])
        except UnicodeEncodeError:
            raise InvalidRequest(f"{param} has a string that is not Unicode; send binary data", param=param) from None
    if datatype == "BOOL":
        if kinds - {bool} and not (kinds == {int} and set(flat) <= {0, 1}):
            raise InvalidRequest(f"{param} must contain only true and false", param=param)
        return bytes(map(bool, flat))
    if datatype == "BF16":
        raise InvalidRequest(f"{param} has BF16, which JSON cannot represent; send binary data", param=param)
    is_float = datatype.startswith("FP")
    if kinds - ({int, float} if is_float else {int}):
        raise InvalidRequest(f"{param} must contain only {'numbers' if is_float else 'integers'}", param=param)
    try:
        packed = (
            struct.pack(f"<{len(flat)}e", *flat) if datatype == "FP16" else array(ARRAY_CODES[datatype], flat).tobytes()
        )
        # A number that is too large for FP32 becomes infinity.
        if is_float and not all(map(math.isfinite, array("f", packed) if datatype == "FP32" else flat)):
            raise OverflowError
    except (OverflowError, struct.error):
        raise InvalidRequest(f"{param} has a number that {datatype} cannot represent", param=param) from None
    return packed


def _flatten(data: list[Any], shape: Sequence[int], param: str) -> list[Any]:
    """Return the elements of a flat list, or of lists that are nested like the shape.

    Raises InvalidRequest if the data does not fit the shape.
    """
    level: list[Any] = [data]
    if data and type(data[0]) is list:
        for size in shape:
            if set(map(type, level)) != {list} or set(map(len, level)) != {size}:
                raise InvalidRequest(f"{param} is not nested as its shape {list(shape)}", param=param)
            level = list(chain.from_iterable(level))
    else:
        level = data
    if len(level) != math.prod(shape):
        message = f"{param} has {len(level)} elements, but its shape {list(shape)} needs {math.prod(shape)}"
        raise InvalidRequest(message, param=param)
    return level


def _split(datatype: Datatype, shape: Sequence[int], data: bytes) -> Iterator[Tensor]:
    """Return the tensor of each item."""
    number, own = shape[0], tuple(shape[1:])
    each = find_element_bytes(datatype)
    if each is None:
        elements = list(decode_elements(data))
        size = math.prod(own)
        pieces = (encode_elements(elements[at * size : (at + 1) * size]) for at in range(number))
    else:
        size = math.prod(own) * each
        pieces = (data[at * size : (at + 1) * size] for at in range(number))
    return (Tensor(datatype, own, piece) for piece in pieces)


def _refuse_shared_memory(parameters: TensorParameters, param: str) -> None:
    if parameters.shared_memory_region is not None:
        raise _unsupported(f"{param}.parameters.{_SHARED_MEMORY}", "send the data: clients and engines share no memory")


def _unsupported(param: str, instead: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported; {instead}", param=param, code=ErrorCode.UNSUPPORTED_VALUE)
