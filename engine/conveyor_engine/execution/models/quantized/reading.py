"""Restores the weights of a quantized checkpoint one at a time, while transformers loads them.

Called by `loader`. A weight is read and restored when transformers takes it, so that no more than a few weights are in
memory twice.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from conveyor_engine.errors import is_out_of_memory
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

    def __init__(self, plan: Iterable[tuple[str, "StoredTensor | Weight"]]) -> None:
        self.failure = ""
        self.no_memory: Exception | None = None
        self.tensors = {name: Restored(self, each) if isinstance(each, Weight) else each for name, each in plan}

    def restore(self, weight: "Weight") -> Tensor:
        """Read a weight. Raises ValueError, and keeps its text, because transformers would hide it.

        Also keeps and raises an error for lack of memory, which says nothing about the checkpoint.
        """
        try:
            tensor = weight.restore()
            if not torch.isfinite(tensor).all():
                raise ValueError("a number or a scale is infinite or NaN")
        except (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                self.no_memory = error
                raise
            text = " ".join(str(error).split())[:200]
            self.failure = self.failure or f"{weight.name}: {text}"
            raise ValueError(self.failure) from error
        return tensor


class Source(NamedTuple):
    """The stored tensors of a weight, by the ends of their names."""

    layout: Layout
    parts: Mapping[str, StoredTensor]
    declared: Declared

    def restore(self) -> Tensor:
        return self.layout.restore({end: part[...] for end, part in self.parts.items()}, self.declared)


class Weight(NamedTuple):
    """A weight that is restored when it is used. name: as in the file.

    source: None in GGUF files. Their weights have `read_grid`, which returns the values that the kernels can keep.
    """

    name: str
    restore: Callable[[], Tensor]
    source: Source | None = None
    read_grid: Callable[[], Grid | None] | None = None


class Restored:
    """A weight in the form in which transformers reads it: `weight[...]`."""

    def __init__(self, restoring: Restoring, weight: Weight) -> None:
        self._restoring, self._weight = restoring, weight
        self.source, self.read_grid = weight.source, weight.read_grid

    def __getitem__(self, whole: Any) -> Tensor:
        return self._restoring.restore(self._weight)


def plan_layouts(stored: Mapping[str, StoredTensor], declared: Declared) -> Iterator[tuple[str, StoredTensor | Weight]]:
    """Yield each weight with its name. Tensors that no layout takes keep theirs."""
    used: set[str] = set()
    for name, tensor in stored.items():
        for layout in LAYOUTS[declared.method]:
            if (parts := _find_parts(stored, layout, name, tensor)) is not None:
                used.update(part.name for part in parts.values())
                source = Source(layout, parts, declared)
                yield name.removesuffix(layout.numbers) + layout.plain, Weight(name, source.restore, source)
                break
    for name, tensor in stored.items():
        if name not in used and not _UNUSED.fullmatch(name.rpartition(".")[2]):
            yield name, tensor


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
