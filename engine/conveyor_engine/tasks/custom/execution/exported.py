"""Loads a program of torch.export as a model and runs it with `graph`. Used by `execution`.

The program's own signature has the names and types of the inputs, the dimension of the batch, and the lengths that
vary, with their limits. A file `model.json` in the same folder has the settings that a signature cannot have.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import EXPORTED_PROGRAM, PROGRAM_SETTINGS, read_object
from conveyor_engine.tasks.custom.execution.archive import DTYPES, Archive, read_archive
from conveyor_engine.tasks.custom.execution.graph import Graph
from conveyor_engine.tasks.custom.execution.tensors import DATATYPES
from conveyor_engine.tasks.custom.model import Batch, Batching
from conveyor_engine.wire.tensors import Signature, TensorSpec

_SYMBOL: Final = re.compile(r"(?:Symbol\('(\w+)'[^()]*\)|(\w+))", re.ASCII)
_LENGTH_MAX: Final = 2**31 - 1
_LEAST_OF_ONE: Final = 2  # torch.export's smallest minimum of a dimension; a program with this minimum runs with 1 too
Dim = int | str
"""A number, the name of a length, or "" for an expression."""


class ExportedProgram:
    """An exported program on a device."""

    def __init__(self, directory: Path, device: torch.device, max_length: int | None) -> None:
        """max_length: a limit for each length that varies, in addition to the program's limits. Raises ModelError."""
        path = directory / EXPORTED_PROGRAM
        self.batching = _read_settings(directory / PROGRAM_SETTINGS)
        archive = read_archive(path)
        try:
            self._build(archive, device, max_length)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    def run(self, batch: Batch) -> Batch:
        """Compute all outputs of a batch."""
        found = self._graph.run(self._values, batch)
        return dict(zip(self._names, found, strict=True))

    @property
    def dtype(self) -> torch.dtype:
        """Return the type that most weights have."""
        kinds = [tensor.dtype for tensor in self._values.values() if tensor.is_floating_point()]
        return max(set(kinds), key=kinds.count, default=torch.float32)

    def _build(self, archive: Archive, device: torch.device, max_length: int | None) -> None:
        module = archive.program["graph_module"]
        graph, own = module["graph"], module["signature"]
        metas = graph["tensor_values"]
        self._values, inputs = _bind(archive, own["input_specs"], device)
        outputs = [_read_user_output(spec) for spec in own["output_specs"]]
        self._names = self.batching.outputs or _name_outputs(module, len(outputs))
        if len(self._names) != len(outputs) or len(set(self._names)) != len(outputs):
            raise ModelError(f"the program has {len(outputs)} outputs, and {PROGRAM_SETTINGS} names {self._names}")
        self._graph = Graph(graph, outputs, device, set(self._values) | set(inputs))
        if missing := [name for name in self.batching.made if name not in inputs]:
            known = ", ".join(inputs)
            raise ModelError(f"{PROGRAM_SETTINGS} names {missing[0]!r}, and the inputs of the program are {known}")
        sent = [name for name in inputs if name not in self.batching.made]
        dims = {name: _read_dims(metas[name]) for name in (*inputs, *outputs)}
        ranges = _read_ranges(archive.program["range_constraints"])
        batch, packs = _find_batch(dims, sent), self.batching.ragged == "pack"
        least, self.max_batch = ranges.get(batch, (0, _LENGTH_MAX))
        if least > _LEAST_OF_ONE and not packs:
            raise ModelError("the program takes no batch of 1: export it with a batch dimension from 1 on")
        symbols = list(dict.fromkeys([*([batch] if packs else []), *_list_lengths(dims, sent)]))
        named = {symbol: "length" if len(symbols) == 1 else f"length_{at}" for at, symbol in enumerate(symbols)}
        shapes = {name: _name_dims(dims[name], named, batch, packs=packs) for name in (*sent, *outputs)}
        self.signature = Signature(
            tuple(TensorSpec(name, _datatype(metas[name]), shapes[name]) for name in sent),
            tuple(
                TensorSpec(name, _datatype(metas[output]), shapes[output])
                for name, output in zip(self._names, outputs, strict=True)
            ),
            _limit({named[symbol]: ranges.get(symbol, (0, _LENGTH_MAX)) for symbol in symbols}, max_length),
        )
        self.made_types = {name: DTYPES[metas[name]["dtype"]] for name in self.batching.made}


def _read_settings(path: Path) -> Batching:
    try:
        settings = msgspec.convert(read_object(path), type=Batching)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error
    if (conflict := settings.find_conflict()) is not None:
        raise ModelError(f"{path}: {conflict}")
    return settings


def _bind(archive: Archive, specs: list[Any], device: torch.device) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return weights and constants on the device, by their names in the graph; and the names of the inputs."""
    values, inputs = dict[str, torch.Tensor](), []
    moved: dict[int, torch.Tensor] = {}  # by id of the original, so that shared weights stay shared
    for spec in specs:
        ((kind, own),) = spec.items()
        match kind:
            case "user_input":
                arg = own["arg"]
                if "as_tensor" not in arg:
                    raise ModelError("an input of the program is no tensor: export it with tensors alone")
                inputs.append(arg["as_tensor"]["name"])
                continue
            case "parameter":
                tensor = archive.weights[own["parameter_name"]]
            case "buffer":
                name = own["buffer_name"]
                tensor = archive.weights[name] if name in archive.weights else archive.constants[name]
            case "tensor_constant":
                tensor = archive.constants[own["tensor_constant_name"]]
            case _:
                raise ModelError(f"the program has an input of the kind {kind!r}: export it with tensors alone")
        values[own["arg"]["name"]] = moved.setdefault(id(tensor), tensor.to(device))
    if not inputs:
        raise ModelError("the program has no input")
    return values, inputs


def _read_user_output(spec: Mapping[str, Any]) -> str:
    ((kind, own),) = spec.items()
    if kind != "user_output":
        raise ModelError(
            f"the program has an output of the kind {kind!r}, and a model keeps nothing between requests: export it in "
            "evaluation mode (model.eval())"
        )
    if "as_tensor" not in own["arg"]:
        raise ModelError("an output of the program is no tensor: export it with tensors alone")
    name: str = own["arg"]["as_tensor"]["name"]
    return name


def _name_outputs(module: Mapping[str, Any], number: int) -> tuple[str, ...]:
    """Return the keys of the dictionary that the program returns. Without a dictionary: `output`, or numbered names."""
    for call in module["module_call_graph"]:
        if call["fqn"] == "" and call["signature"] is not None:
            _, spec = json.loads(call["signature"]["out_spec"])
            if spec["type"] == "builtins.dict" and all(child["type"] is None for child in spec["children_spec"]):
                return tuple(map(str, json.loads(spec["context"])))
    return ("output",) if number == 1 else tuple(f"output_{index}" for index in range(number))


def _read_dims(meta: Mapping[str, Any]) -> list[Dim]:
    dims: list[Dim] = []
    for size in meta["sizes"]:
        ((kind, value),) = size.items()
        if kind == "as_int":
            dims.append(int(value))
        else:
            match = _SYMBOL.fullmatch(value["expr_str"])
            dims.append((match[1] or match[2]) if match else "")
    return dims


def _read_ranges(ranges: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    def read(value: Any, other: int) -> int:
        return max(0, min(value, _LENGTH_MAX)) if type(value) is int else other

    return {name: (read(limit["min_val"], 0), read(limit["max_val"], _LENGTH_MAX)) for name, limit in ranges.items()}


def _find_batch(dims: Mapping[str, list[Dim]], sent: list[str]) -> str:
    """Return the symbol that is the first dimension of all inputs. Raises ModelError if they share no such symbol.

    The symbol stands for the number of items or, in a packed batch, for the sum of their lengths.
    """
    first = {name: dims[name][0] if dims[name] else 0 for name in sent}
    (batch, *others) = set(first.values())
    if others or not isinstance(batch, str) or not batch:
        sizes = ", ".join(f"{name} {size or 'none'}" for name, size in first.items())
        raise ModelError(
            "the first dimension of each input must be one that varies, the batch: export the program with "
            f"torch.export.Dim for dimension 0 of all inputs. It has {sizes}"
        )
    return batch


def _list_lengths(dims: Mapping[str, list[Dim]], sent: list[str]) -> Iterator[str]:
    """Yield the lengths that vary, without the batch. Raises ModelError for an expression."""
    for name in sent:
        for size in dims[name][1:]:
            if size == "":
                raise ModelError(f"a dimension of the input {name!r} is an expression: export it as one that varies")
            if isinstance(size, str):
                yield size


def _limit(ranges: Mapping[str, tuple[int, int]], max_length: int | None) -> dict[str, tuple[int, int]]:
    """Return the minimum and the maximum of each length. Raises ModelError if a length has no maximum."""
    found = {}
    for name, (least, most) in ranges.items():
        if most == _LENGTH_MAX and max_length is None:
            raise ModelError(
                f"the length {name!r} of the program has no limit: export it with torch.export.Dim(..., max=...), or "
                "set `max_model_len`"
            )
        found[name] = 1 if least <= _LEAST_OF_ONE else least, most if max_length is None else min(most, max_length)
    return found


def _name_dims(dims: list[Dim], named: Mapping[str, str], batch: str, *, packs: bool) -> tuple[Dim, ...]:
    """Return the shape of an item: without the batch, or, if items are packed, with the item's length in its place."""
    own = dims if packs and dims[:1] == [batch] else dims[1:]
    return tuple(size if isinstance(size, int) else named.get(size, "") for size in own)


def _datatype(meta: Mapping[str, Any]) -> Any:
    dtype = DTYPES.get(meta["dtype"])
    if dtype not in DATATYPES:
        raise ModelError("an input or output of the program has a type that the Open Inference Protocol does not have")
    return DATATYPES[dtype]
