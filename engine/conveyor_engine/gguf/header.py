"""Reads the beginning of a GGUF file: metadata, and where each tensor is. Uses neither torch nor transformers.

A tenant wrote the file, so every number in it is checked before it is used: a header has at most 64 MiB, and every
tensor lies within its file. Layout: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from conveyor_engine.errors import ModelError
from conveyor_protocol.failure_reasons import FailureReason

_MAX_BYTES: Final = 64 << 20  # of a header; a vocabulary of 262,000 tokens and its merges take 16 MiB
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 16
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Kind(NamedTuple):
    """A number type of ggml: blocks of `numbers` numbers in `num_bytes` bytes."""

    name: str
    numbers: int
    num_bytes: int


KINDS: Final[Mapping[int, Kind]] = {
    0: Kind("F32", 1, 4), 1: Kind("F16", 1, 2), 30: Kind("BF16", 1, 2),
    2: Kind("Q4_0", 32, 18), 3: Kind("Q4_1", 32, 20), 6: Kind("Q5_0", 32, 22), 7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34), 10: Kind("Q2_K", 256, 84), 11: Kind("Q3_K", 256, 110), 12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176), 14: Kind("Q6_K", 256, 210), 16: Kind("IQ2_XXS", 256, 66), 17: Kind("IQ2_XS", 256, 74),
    18: Kind("IQ3_XXS", 256, 98), 19: Kind("IQ1_S", 256, 50), 20: Kind("IQ4_NL", 32, 18), 21: Kind("IQ3_S", 256, 110),
    22: Kind("IQ2_S", 256, 82), 23: Kind("IQ4_XS", 256, 136), 29: Kind("IQ1_M", 256, 56),
    39: Kind("MXFP4", 32, 17),
}  # fmt: skip
FLOATS: Final = frozenset({"F32", "F16", "BF16"})
# `general.file_type`: llama.cpp's name for the mixture of types.
_FILE_TYPES: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 38: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file. shape: rows before columns."""

    path: Path
    kind: Kind
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def read(self, first: int = 0, count: int | None = None) -> bytes:
        """Return the stored bytes, or up to `count` of them from `first` on.

        Raises ValueError if the file has become shorter.
        """
        count = min(self.num_bytes - first, self.num_bytes if count is None else count)
        with self.path.open("rb") as file:
            file.seek(self.start + first)
            content = file.read(count)
        if len(content) != count:
            raise ValueError(f"{self.path} has become shorter")
        return content


@dataclass(frozen=True, slots=True)
class Header:
    """What the files of one model contain."""

    metadata: Mapping[str, Any]  # of the first file
    tensors: Mapping[str, TensorPlace]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))[:100]

    @property
    def file_type(self) -> str:
        """Return llama.cpp's name for the mixture of types, such as `Q4_K_M`; "" if the file has none."""
        kind = self.metadata.get("general.file_type")
        return _FILE_TYPES.get(kind, "") if type(kind) is int else ""

    @property
    def pools(self) -> bool:
        """Return whether the model embeds: it makes one vector of a text, by llama.cpp's number for a pooling."""
        return self.find("pooling_type") not in (None, 0)

    def find(self, key: str) -> Any:
        """Return the metadata of the architecture under this key; None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_header(paths: Sequence[Path]) -> Header:
    """Read the headers of a model's files, in their order. Raises ModelError."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorPlace] = {}
    for path in paths:
        try:
            found, places = _read_file(path)
        except OSError as error:
            raise ModelError(
                f"{path} cannot be read: {error.strerror}", reason=FailureReason.MODEL_UNREADABLE
            ) from error
        except (struct.error, ValueError, TypeError, RecursionError) as error:
            raise ModelError(
                f"{path} is not a whole GGUF file, copy or download it again: {error}",
                reason=FailureReason.MODEL_UNREADABLE,
            ) from error
        if both := tensors.keys() & places.keys():
            raise ModelError(f"{path} has {min(both)[:200]} a second time")
        metadata = metadata or found
        tensors |= places
    expected = metadata.get("split.count", 1)
    if expected not in (len(paths), 0):
        raise ModelError(f"{paths[0]} is one of {expected} files, and {len(paths)} are there")
    return Header(metadata, tensors)


class _Cursor:
    """A position in the beginning of a file. Reading past the end raises struct.error."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def read(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._content, self.position)
        self.position += struct.calcsize(f"<{form}")
        return values

    def read_text(self) -> str:
        (length,) = self.read("Q")
        end = self.position + length
        if end > len(self._content):
            raise ValueError(f"a text of {length} bytes exceeds the header")
        self.position, begin = end, self.position
        return self._content[begin:end].decode()

    def read_value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.read(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.read_text()
        if kind != _ARRAY:
            raise ValueError(f"a value has the unknown type {kind}")
        inner, count = self.read("IQ")
        if count > len(self._content):
            raise ValueError(f"an array of {count} values exceeds the header")
        if inner in _NUMBERS:
            return list(self.read(f"{count}{_NUMBERS[inner]}"))
        if inner != _STRING:
            raise ValueError(f"an array has the type {inner}")
        return [self.read_text() for _ in range(count)]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        cursor = _Cursor(file.read(_MAX_BYTES))
    magic, version, num_tensors, num_values = cursor.read("4sIQQ")
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.read_text()
        metadata[key] = cursor.read_value(*cursor.read("I"))
    tensors = dict(_read_place(cursor) for _ in range(num_tensors))
    if len(tensors) != num_tensors:
        raise ValueError("two tensors have one name")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise ValueError(f"the alignment is {alignment!r}")
    begin = -(-cursor.position // alignment) * alignment
    return metadata, {name: _place(path, size, begin, name, *place) for name, place in tensors.items()}


def _read_place(cursor: _Cursor) -> tuple[str, tuple[tuple[int, ...], int, int]]:
    name = cursor.read_text()
    (num_dims,) = cursor.read("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise ValueError(f"{name[:200]} has {num_dims} dimensions")
    dims = cursor.read(f"{num_dims}Q")
    kind, offset = cursor.read("IQ")
    return name, (tuple(reversed(dims)), kind, offset)


def _place(
    path: Path, size: int, begin: int, name: str, shape: tuple[int, ...], kind_id: int, offset: int
) -> TensorPlace:
    kind = KINDS.get(kind_id)
    if kind is None:
        raise ModelError(f"{path} has {name[:200]} in ggml's type {kind_id}, which this engine does not read")
    if min(shape) < 1 or shape[-1] % kind.numbers:
        raise ValueError(f"{name[:200]} of {shape} cannot be stored as {kind.name}")
    num_bytes = math.prod(shape) // kind.numbers * kind.num_bytes
    if begin + offset + num_bytes > size:
        raise ValueError(f"{name[:200]} ends at byte {begin + offset + num_bytes}, and the file has {size} bytes")
    return TensorPlace(path, kind, shape, begin + offset, num_bytes)
