"""Restores the weights of a quantized checkpoint one at a time.

Called by `loader`. A weight is read when transformers takes it, or when it is packed (`deferred`), so that no more than
a few weights are in memory twice.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from conveyor_engine.errors import ModelError, is_out_of_memory
from conveyor_engine.execution.models.quantized.deferred import Deferred
from conveyor_engine.execution.models.quantized.grids import Shape, find_shape, read_grid
from conveyor_engine.execution.models.quantized.layouts import LAYOUTS, Layout
from conveyor_engine.execution.models.quantized.rounding import Grid
from conveyor_engine.execution.models.quantized.stored import StoredTensor
from conveyor_engine.quantization import Declared

# Of activations and of a KV cache in 8 bits. Both keep their 16 bits here.
_UNUSED: Final = re.compile(r"(?:input|output|activation|act|prob|[qkv])_(?:global_)?(?:scale|zero_point)(?:_inv)?")


class Restoring:
    """The weights of a checkpoint by their names in the unquantized one.

    failure: the first one, as a sentence. no_memory: the error, if memory was too small.
    """

    def __init__(self, plan: Iterable[tuple[str, "StoredTensor | Weight"]], directory: Path, *, defers: bool) -> None:
        """defers: whether weights are read when they are packed, and not when transformers loads them."""
        self.failure = ""
        self.no_memory: Exception | None = None
        self._directory, self.defers = directory, defers
        self.tensors = {name: Restored(self, each) if isinstance(each, Weight) else each for name, each in plan}

    def build_error(self) -> ModelError:
        """Return the error for a checkpoint with a failure."""
        return ModelError(f"the checkpoint in {self._directory} is damaged: {self.failure}")

    def restore(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Read a weight. Raises ValueError, and keeps its text, because transformers would hide it.

        Also keeps and raises an error for lack of memory, which says nothing about the checkpoint.
        """
        try:
            tensor = read()
            is_read = tensor.is_floating_point() and not isinstance(tensor, Deferred)
            if is_read and not torch.isfinite(tensor).all():
                raise ValueError("a number or a scale is infinite or NaN")
        except (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                self.no_memory = error
                raise
            text = " ".join(str(error).split())[:200]
            self.failure = self.failure or f"{name}: {text}"
            raise ValueError(self.failure) from error
        return tensor


class Leaf(NamedTuple):
    """A weight as it is stored, before conversions. name: as in the file.

    find_shape: returns the shape without reading numbers. read_grid: gets whether the kernels can keep FP8 and FP4, and
    the shape.
    """

    name: str
    find_shape: Callable[[], Shape]
    restore: Callable[[], Tensor]
    read_grid: Callable[[bool, Shape], Grid | None]


def _take_first(values: Mapping[str, Tensor]) -> Tensor:
    return next(iter(values.values()))


def _turn(values: Mapping[str, Tensor]) -> Tensor:
    return _take_first(values).transpose(-2, -1)


class Weight(NamedTuple):
    """Stored weights, and what makes one weight of transformers' class of them."""

    leaves: Mapping[str, Leaf]
    convert: Callable[[Mapping[str, Tensor]], Tensor] = _take_first


class Restored:
    """A weight in the form in which transformers reads it: `weight[...]`."""

    def __init__(self, restoring: Restoring, weight: Weight) -> None:
        self._restoring, self._weight = restoring, weight

    def __getitem__(self, whole: Any) -> Tensor:
        return self._restoring.restore(next(iter(self._weight.leaves.values())).name, self._read)

    def _read(self) -> Tensor:
        leaves = self._weight.leaves
        if not self._restoring.defers:
            return self._weight.convert({key: leaf.restore() for key, leaf in leaves.items()})
        stored = {key: _Stored(self._restoring, leaf, leaf.find_shape()) for key, leaf in leaves.items()}
        return self._weight.convert({key: Deferred.of(each) for key, each in stored.items()})


class _Stored:
    """A weight that is read later. Raises ModelError if it is damaged."""

    def __init__(self, restoring: Restoring, leaf: Leaf, shape: Shape) -> None:
        self._restoring, self._leaf, self.shape = restoring, leaf, shape

    def read(self) -> Tensor:
        return self._guard(self._restore)

    def read_grid(self, *, keeps_floats: bool) -> Grid | None:
        try:
            grid = self._leaf.read_grid(keeps_floats, self.shape)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            return None  # `read` finds out what is damaged
        return None if grid is None else replace(grid, numbers=partial(self._read_numbers, grid))

    def _read_numbers(self, grid: Grid, first: int, count: int) -> Tensor:
        def read() -> Tensor:
            assert grid.numbers is not None
            numbers = grid.numbers(first, count)
            if numbers.shape != (min(count, len(grid.scales) - first), self.shape[-1]):
                raise ValueError(f"numbers of {tuple(numbers.shape)} do not fit weights of {self.shape}")
            return numbers

        return self._guard(read)

    def _restore(self) -> Tensor:
        weight = self._leaf.restore()
        if tuple(weight.shape) != self.shape:
            raise ValueError(f"numbers of {tuple(weight.shape)} do not fit weights of {self.shape}")
        return weight

    def _guard(self, read: Callable[[], Tensor]) -> Tensor:
        try:
            return self._restoring.restore(self._leaf.name, read)
        except ValueError as error:
            raise self._restoring.build_error() from error


def plan_layouts(stored: Mapping[str, StoredTensor], declared: Declared) -> Iterator[tuple[str, StoredTensor | Weight]]:
    """Yield each weight with its name. Tensors that no layout takes keep theirs."""
    used: set[str] = set()
    for name, tensor in stored.items():
        for layout in LAYOUTS[declared.method]:
            if (parts := _find_parts(stored, layout, name, tensor)) is not None:
                used.update(part.name for part in parts.values())
                yield (
                    name.removesuffix(layout.numbers) + layout.plain,
                    Weight({"": _make_leaf(name, layout, parts, declared)}, _turn if layout.is_turned else _take_first),
                )
                break
    for name, tensor in stored.items():
        if name not in used and not _UNUSED.fullmatch(name.rpartition(".")[2]):
            yield name, tensor


def _make_leaf(name: str, layout: Layout, parts: Mapping[str, StoredTensor], declared: Declared) -> Leaf:
    return Leaf(
        name,
        lambda: find_shape(parts, declared, layout.restore),
        lambda: layout.restore({end: part[...] for end, part in parts.items()}, declared),
        partial(read_grid, parts, declared, layout.restore),
    )


def _find_parts(
    stored: Mapping[str, StoredTensor], layout: Layout, name: str, tensor: StoredTensor
) -> Mapping[str, StoredTensor] | None:
    """Return the tensors of the weight whose numbers are in `tensor`; None if they are not in this layout."""
    if tensor.kind not in layout.kinds or not name.endswith(layout.numbers):
        return None
    stem = name.removesuffix(layout.numbers)
    found = {end: stored.get(stem + end) for end in (layout.numbers, *layout.needed, *layout.optional)}
    parts = {end: part for end, part in found.items() if part is not None}
    return parts if all(end in parts for end in layout.needed) else None
