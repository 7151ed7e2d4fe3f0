"""Loads a model that is a Python class in the engine's image. Used by `execution`."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from conveyor_engine.errors import ConfigError
from conveyor_engine.tasks.custom.model import Batch, Batching, Model, TensorSpec
from conveyor_engine.wire.tensors import Signature


class PythonProgram:
    """An object of the class, with its model loaded."""

    made_types: dict[str, torch.dtype]

    def __init__(self, name: str, directory: Path, device: torch.device, max_length: int | None) -> None:
        """Load the class and its model. Raises ConfigError if the class cannot be used, and whatever `load` raises."""
        kind = _find_class(name)
        self.batching, self.max_batch = kind.batching, kind.max_batch
        lengths = {
            name: (least, most if max_length is None else min(most, max_length))
            for name, (least, most) in kind.lengths.items()
        }
        self.signature = Signature(tuple(kind.inputs), tuple(kind.outputs), lengths)
        if (problem := find_problem(self.signature, self.batching)) is not None:
            raise ConfigError(f"`model_class` is {name}: {problem}")
        made = {self.batching.mask: torch.bool, self.batching.lengths: torch.int64, self.batching.offsets: torch.int64}
        self.made_types = {name: dtype for name, dtype in made.items() if name is not None}
        self._model = kind()
        self._model.load(directory, device)

    def run(self, batch: Batch) -> Batch:
        return self._model.run(batch)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the first floating-point weight of the object's modules; float32 if it has none."""
        modules = (value for value in vars(self._model).values() if isinstance(value, torch.nn.Module))
        weights = (weight for module in modules for weight in module.parameters() if weight.is_floating_point())
        return next((weight.dtype for weight in weights), torch.float32)


def _find_class(name: str) -> type[Model]:
    module, _, attribute = name.partition(":")
    try:
        found: Any = getattr(import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(f"`model_class` is {name}, which this image does not have: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Model) and found is not Model):
        base = f"{Model.__module__}:{Model.__name__}"
        raise ConfigError(f"`model_class` is {name}, which is no class that extends {base}")
    return found


def find_problem(signature: Signature, batching: Batching) -> str | None:
    """Return a sentence about a problem with the tensors that a class declares; None if there is no problem."""
    specs: Sequence[TensorSpec] = (*signature.inputs, *signature.outputs)
    names = [spec.name for spec in signature.inputs]
    if not signature.inputs or not signature.outputs:
        return "it needs an input and an output, at least"
    for group in ([*names, *batching.made], [spec.name for spec in signature.outputs]):
        if len(set(group)) != len(group):
            return f"it has two tensors of one name among {', '.join(group)}"
    for spec in specs:
        for size in spec.shape:
            if isinstance(size, str) and size not in signature.lengths:
                return f"{spec.name} has the length {size!r}, and `lengths` does not have it"
            if isinstance(size, int) and size < 0:
                return f"{spec.name} has the size {size}: name a length that varies"
    for name, (least, most) in signature.lengths.items():
        if not 0 <= least <= most:
            return f"the length {name!r} is from {least} to {most}"
    if batching.ragged != "stack" and any(spec.datatype == "BYTES" or spec.is_optional for spec in signature.inputs):
        return '`ragged: "pad"` and "pack" take neither inputs of BYTES nor optional ones'
    first = [spec.shape[:1] for spec in signature.inputs]
    if batching.ragged == "pack" and (
        len(set(first)) != 1 or first[0][:1] not in [(name,) for name in signature.lengths]
    ):
        return '`ragged: "pack"` needs one length as the first size of each input'
    return batching.find_conflict()
