"""Reads the archive of an exported program: its graph as JSON, and its tensors. Unpickles and evaluates nothing.

torch.export.load is not safe for files from others. It unpickles sample inputs, and weights and constants that are
marked as pickles. It evaluates symbolic expressions and guards as Python, imports modules that tree specs name, and
writes names of nodes into code (ADR 93). So this module reads the archive as data. An archive is a zip file without
compression, whose JSON has torch's export schema, major version 8, and whose tensors are bytes. Content that needs a
pickle is refused.
"""

import json
import math
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from conveyor_engine.errors import ModelError
from conveyor_protocol.failure_reasons import FailureReason

SCHEMA_MAJOR: Final = 8
_JSON_BYTES_MAX: Final = 64 << 20
_ENTRIES_MAX: Final = 100_000
_MODEL_JSON: Final = re.compile(r"[^/]+/models/([^/]+)\.json")
DTYPES: Final[Mapping[int, torch.dtype]] = {
    1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64, 6: torch.float16, 7: torch.float32,
    8: torch.float64, 12: torch.bool, 13: torch.bfloat16, 28: torch.uint16, 34: torch.uint32, 35: torch.uint64,
}  # fmt: skip
_STRIDED: Final = 7


@dataclass(frozen=True, slots=True)
class Archive:
    """The content of an archive."""

    program: dict[str, Any]  # ExportedProgram of torch's export schema
    weights: dict[str, torch.Tensor]  # parameters and buffers by name, on the CPU
    constants: dict[str, torch.Tensor]


def read_archive(path: Path) -> Archive:
    """Read the file. Raises ModelError if it is not an archive, or has content that is not supported."""
    try:
        with zipfile.ZipFile(path) as opened:
            return _read(opened)
    except (zipfile.BadZipFile, EOFError) as error:
        message = f"{path} is no archive of torch.export.save: {error}"
        raise ModelError(message, reason=FailureReason.MODEL_UNREADABLE) from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as error:
        raise ModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _read(opened: zipfile.ZipFile) -> Archive:
    entries = opened.infolist()
    if len(entries) > _ENTRIES_MAX or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ModelError("the program's archive is compressed or has too many files: write it with torch.export.save")
    found = [match for entry in entries if (match := _MODEL_JSON.fullmatch(entry.filename))]
    if len(found) != 1:
        raise ModelError(f"the archive has {len(found)} programs, not one: write it with torch.export.save")
    name, root = found[0][1], found[0][0].partition("/")[0]
    program = _read_json(opened, found[0][0])
    version = program["schema_version"]["major"]
    if version != SCHEMA_MAJOR:
        raise ModelError(
            f"the program has version {version} of torch's export schema, and this engine reads {SCHEMA_MAJOR}: "
            f"export it again with torch {torch.__version__.partition('+')[0]}"
        )
    weights = _read_tensors(opened, f"{root}/data/weights", f"{name}_weights_config.json")
    return Archive(program, weights, _read_tensors(opened, f"{root}/data/constants", f"{name}_constants_config.json"))


def _read_json(opened: zipfile.ZipFile, name: str) -> Any:
    if (num_bytes := opened.getinfo(name).file_size) > _JSON_BYTES_MAX:
        raise ModelError(f"{name} has {num_bytes} bytes; at most {_JSON_BYTES_MAX} are allowed")
    return json.loads(opened.read(name))


def _read_tensors(opened: zipfile.ZipFile, folder: str, config: str) -> dict[str, torch.Tensor]:
    storages: dict[str, torch.Tensor] = {}
    tensors = {}
    for name, entry in _read_json(opened, f"{folder}/{config}")["config"].items():
        file, meta = entry["path_name"], entry["tensor_meta"]
        if entry["use_pickle"] or meta is None or not re.fullmatch(r"(?:weight|tensor)_\d+", file):
            raise ModelError(
                f"{name[:200]!r} of the program is a pickle or an object, which can run code when it is loaded: "
                "export a program whose weights and constants are plain tensors"
            )
        if file not in storages:
            data = opened.read(f"{folder}/{file}")
            storages[file] = torch.frombuffer(bytearray(data) or bytearray(8), dtype=torch.uint8)
        tensors[name] = _view(storages[file], meta)
    return tensors


def _view(storage: torch.Tensor, meta: dict[str, Any]) -> torch.Tensor:
    """Return the tensor whose memory is these bytes. Torch raises an error if the tensor needs more bytes."""
    if meta["layout"] != _STRIDED or meta["dtype"] not in DTYPES:
        raise ModelError("a weight of the program is sparse, quantized or complex: export it as a plain tensor")
    dtype = DTYPES[meta["dtype"]]
    sizes, strides = ([read_int(size) for size in meta[name]] for name in ("sizes", "strides"))
    if math.prod(sizes) == 0:
        return torch.empty(sizes, dtype=dtype)
    whole = storage[: len(storage) // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(sizes, strides, read_int(meta["storage_offset"]))


def read_int(size: dict[str, Any]) -> int:
    """Return a fixed size. Raises ValueError if the size varies."""
    value = size.get("as_int")
    if type(value) is not int:
        raise ValueError(f"a size of a weight varies: {str(size)[:100]}")
    return value
