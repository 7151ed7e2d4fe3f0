"""Reads a linear layer from a file of torch.save, as bge-m3 has its heads. Unpickles nothing.

Called by `heads`. Such a file is an archive with a pickle, which describes the tensors, and the numbers of each tensor.
The pickle is read as data: only the operations with which torch.save writes a dict of tensors are followed, no object
is made and no function is called.
"""

import math
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch
from torch import nn

from conveyor_engine.errors import ModelError

_FILE_BYTES_MAX: Final = 64 << 20
_PICKLE_BYTES_MAX: Final = 64 << 10
_OUT_FEATURES_MAX: Final = 65_536
_DTYPES: Final = {
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
}
_DICT, _TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
_SIZES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUSHED: Final[dict[str, Callable[[], object]]] = {
    "EMPTY_TUPLE": tuple, "EMPTY_DICT": dict, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
}  # fmt: skip
_IGNORED: Final = frozenset({"PROTO", "FRAME", "STOP"})
_OF_ARGUMENT: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "GLOBAL"})


def read_linear(path: Path, in_features: int) -> nn.Linear:
    """Return the layer in float32. The file has its `weight` (out, in) and its `bias` (out,). Raises ModelError."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise ValueError(f"it has more than {_FILE_BYTES_MAX >> 20} MiB")
        with ZipFile(path) as archive:
            state = _read_state(archive, in_features)
    except (OSError, BadZipFile, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        # What other errors say can be as long as the file makes it.
        why = f"{error}"[:200] if isinstance(error, ValueError) else type(error).__name__
        raise ModelError(f"{path} is not a file of torch.save with one linear layer: {why}") from error
    linear = nn.Linear(in_features, len(state["bias"]), device="meta")
    linear.load_state_dict(state, assign=True)
    return linear.eval().requires_grad_(False)


def _read_state(archive: ZipFile, in_features: int) -> dict[str, torch.Tensor]:
    files = {each.filename.partition("/")[2]: each for each in archive.infolist()}
    if "byteorder" in files and _read(archive, files["byteorder"], 16) != b"little":
        raise ValueError("its numbers are not little-endian")
    described = _follow(_read(archive, files["data.pkl"], _PICKLE_BYTES_MAX))
    if not isinstance(described, dict) or set(described) != {"weight", "bias"}:
        raise ValueError("it has other tensors than weight and bias")
    (out_features,) = described["bias"][2]
    if type(out_features) is not int or not 0 < out_features <= _OUT_FEATURES_MAX:
        raise ValueError("the shape of its bias is not one number of outputs")
    shapes = {"weight": (out_features, in_features), "bias": (out_features,)}
    return {name: _read_tensor(archive, files, shape, *described[name]) for name, shape in shapes.items()}


def _read(archive: ZipFile, file: ZipInfo, bytes_max: int) -> bytes:
    if file.compress_type != ZIP_STORED or file.file_size > bytes_max:
        raise ValueError(f"a part of it is compressed, or has more than {bytes_max} bytes")
    return archive.read(file)


def _read_tensor(
    archive: ZipFile, files: Mapping[str, ZipInfo], shape: tuple[int, ...], *described: Any
) -> torch.Tensor:
    """Return a tensor in float32. described: the arguments with which torch would make it."""
    (_, kind, key, _, _), offset, found, stride = described[:4]
    has_integers = all(type(number) is int for number in (offset, *found, *stride))
    if not has_integers or offset or found != shape or stride != (*shape[1:], 1):
        raise ValueError(f"a tensor does not have the shape {shape}, or does not lie in a row")
    if not isinstance(kind, str) or not isinstance(key, str):
        raise TypeError("the numbers of a tensor have no name")
    dtype = _DTYPES[kind]
    numbers = bytearray(_read(archive, files[f"data/{key}"], math.prod(shape) * dtype.itemsize))
    return torch.frombuffer(numbers, dtype=dtype).view(shape).float()


def _follow(pickle: bytes) -> Any:
    """Return what the pickle describes: names and arguments in place of the objects that they would make.

    Raises ValueError for other operations than those of torch.save, and LookupError or TypeError if they do not fit.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def pop_marked() -> list[Any]:
        begin = marks.pop()
        marked = stack[begin:]
        del stack[begin:]
        return marked

    def set_items(items: list[Any]) -> None:
        if not all(isinstance(name, str) for name in items[::2]):
            raise TypeError("a tensor has no name")
        stack[-1].update(zip(items[::2], items[1::2], strict=True))

    actions: dict[str, Callable[[Any], None]] = {
        "MARK": lambda _: marks.append(len(stack)),
        "TUPLE": lambda _: stack.append(tuple(pop_marked())),
        "BINPUT": lambda place: memo.__setitem__(place, stack[-1]),
        "BINGET": lambda place: stack.append(memo[place]),
        "BINPERSID": lambda _: None,  # the tuple that names the numbers stays
        "REDUCE": lambda _: stack.append(_reduce(arguments=stack.pop(), function=stack.pop())),
        "SETITEM": lambda _: set_items([stack.pop(-2), stack.pop()]),
        "SETITEMS": lambda _: set_items(pop_marked()),
        "BUILD": lambda _: stack.pop() and None,  # the version of a module's state
    }
    for operation, argument, _ in pickletools.genops(pickle):
        name = operation.name
        if name in _OF_ARGUMENT:
            stack.append(argument)
        elif name in _PUSHED:
            stack.append(_PUSHED[name]())
        elif name in _SIZES:
            stack[-_SIZES[name] :] = [tuple(stack[-_SIZES[name] :])]
        elif name in actions:
            actions[name](argument)
        elif name not in _IGNORED:
            raise ValueError(f"its pickle has the operation {name}")
    (described,) = stack
    return described


def _reduce(arguments: Any, function: Any) -> Any:
    if not isinstance(function, str) or not isinstance(arguments, tuple):
        raise TypeError("its pickle calls what has no name")
    if function == _DICT and not arguments:
        return {}
    if function == _TENSOR:
        return arguments
    raise ValueError(f"its pickle calls {function[:100]!r}")
