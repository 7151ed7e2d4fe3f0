"""Tensors in requests, and the signatures of models, for tasks whose inputs and outputs are tensors.

Each item of a batch is a request of its own, so shapes here have no batch dimension. Data are in row-major order and
little-endian; an element of `BYTES` is its length (4 bytes) and its bytes, as in the Open Inference Protocol.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, get_args

import msgspec

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64",
    "BYTES",
]  # fmt: skip
DATATYPES: Final[tuple[Datatype, ...]] = get_args(Datatype)
ARRAY_CODES: Final[Mapping[str, str]] = {  # type codes of array.array, for the types that it supports
    "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_ELEMENT_BYTES: Final[dict[str, int]] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip
_LENGTH: Final = struct.Struct("<I")


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """An input or output of a model, for one item."""

    name: str
    datatype: Datatype
    shape: tuple[int | str, ...] = ()  # a number, or the name of a length that varies
    is_optional: bool = False  # an input that a request may leave out

    @property
    def batch_shape(self) -> list[int]:
        """Return the shape with the batch as first dimension; -1 for sizes that vary, as in the Open Inference
        Protocol."""
        return [-1, *(-1 if isinstance(size, str) else size for size in self.shape)]


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """All inputs and outputs of a model."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    lengths: dict[str, tuple[int, int]] = {}  # minimum and maximum of each length that varies, by its name

    def bind(self, spec: TensorSpec, shape: Sequence[int], bound: dict[str, int]) -> bool:
        """Return whether an item may have this shape, given the lengths in `bound`.

        Adds the shape's lengths to `bound`.
        """
        if len(shape) != len(spec.shape):
            return False
        for given, size in zip(shape, spec.shape, strict=True):
            if isinstance(size, int):
                if given != size:
                    return False
            elif not (
                self.lengths[size][0] <= given <= self.lengths[size][1] and bound.setdefault(size, given) == given
            ):
                return False
        return True

    def fill(self, spec: TensorSpec, lengths: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape that `spec` has in an item with these lengths."""
        return tuple(size if isinstance(size, int) else lengths[size] for size in spec.shape)


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of one item."""

    datatype: Datatype
    shape: tuple[int, ...]
    data: bytes

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


Tensors = Mapping[str, Tensor]
encode_tensors: Final = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(dict[str, Tensor])


def decode_tensors(payload: bytes) -> dict[str, Tensor]:
    """Decode the tensors of one item, which `encode_tensors` has encoded."""
    return _decoder.decode(payload)


def find_element_bytes(datatype: Datatype) -> int | None:
    """Return the number of bytes of an element; None if elements have different lengths."""
    return _ELEMENT_BYTES.get(datatype)


def encode_elements(elements: Sequence[bytes]) -> bytes:
    """Encode the elements of a tensor of `BYTES`."""
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def decode_elements(data: bytes) -> Iterator[bytes]:
    """Yield the elements of a tensor of `BYTES`. Raises ValueError if the data end in the middle of an element."""
    position = 0
    while position < len(data):
        begin = position + _LENGTH.size
        if begin > len(data):
            raise ValueError("the data end within a length")
        position = begin + _LENGTH.unpack_from(data, begin - _LENGTH.size)[0]
        if position > len(data):
            raise ValueError("the data end within an element")
        yield data[begin:position]
