"""Finds the tensors of a checkpoint in its safetensors files. A tensor's numbers are read only when it is used."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from conveyor_engine.model_files import check_is_inside, read_weight_names

_WEIGHTS: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors")


class StoredTensor:
    """A tensor in a file, as transformers expects it: `tensor[...]` reads it, and `tensor[first:end]` some rows."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self.name = name
        self.kind = str(file.get_slice(name).get_dtype())
        """The number type, by its name in safetensors."""
        self.shape: list[int] = file.get_slice(name).get_shape()

    def __getitem__(self, part: Any) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self.name) if part is ... else self._file.get_slice(self.name)[part]
        return tensor


def read_stored(directory: Path, weights: str | None) -> Iterator[StoredTensor]:
    """Yield all stored tensors. weights: the file with the weights, if config.json names one.

    Files that cannot be read are left to the loader.
    """
    for path in _list_weights(directory, weights):
        try:
            file = safe_open(path, framework="pt")
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            yield from [StoredTensor(file, name) for name in names]
        except (SafetensorError, OSError):
            continue


def _list_weights(directory: Path, weights: str | None) -> list[Path]:
    """Return the files that transformers or diffusers load: a whole file, or else the files of an index.

    Raises ModelError for a file outside `directory`.
    """
    for name in (weights,) if weights else _WEIGHTS:
        check_is_inside(directory, name, "config.json")
        if (directory / name).is_file() and name.endswith(".safetensors"):
            return [directory / name]
        named = read_weight_names(directory, name if name.endswith(".json") else f"{name}.index.json")
        if named is not None:
            return [directory / each for each in named]
    return []
