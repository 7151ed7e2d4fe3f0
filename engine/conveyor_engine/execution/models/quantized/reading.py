"""Restores the weights of a quantized checkpoint one at a time, while transformers loads them.

Called by `loader`. A weight is read and restored when transformers takes it, so that no more than a few weights are in
memory twice.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from conveyor_engine.errors import is_out_of_memory
from conveyor_engine.execution.models.quantized.layouts import LAYOUTS, Layout
from conveyor_engine.execution.models.quantized.stored import StoredTensor
from conveyor_engine.quantization import Declared

# Of activations and of a KV cache in 8 bits. Both keep their 16 bits here.
_UNUSED: Final = re.compile(r"(?:input|output|activation|act|prob|[qkv])_(?:global_)?(?:scale|zero_point)(?:_inv)?")


class Restoring:
    """The weights of a checkpoint by their names in the unquantized one.

    failure: the first one, as a sentence. no_memory: the error, if memory was too small.
    """

    def __init__(self, stored: Mapping[str, StoredTensor], declared: Declared) -> None:
        self._stored, self._declared = stored, declared
        self.failure = ""
        self.no_memory: Exception | None = None
        self.num_restored = 0
        self.tensors = dict(self._plan())

    def _plan(self) -> Iterator[tuple[str, "StoredTensor | _Restored"]]:
        """Yield each weight with its name. Tensors that no layout takes keep theirs."""
        used: set[str] = set()
        for name, tensor in self._stored.items():
            for layout in LAYOUTS[self._declared.method]:
                if (parts := self._find_parts(layout, name, tensor)) is not None:
                    used.update(part.name for part in parts.values())
                    self.num_restored += 1
                    yield name.removesuffix(layout.numbers) + layout.plain, _Restored(self, layout, parts)
                    break
        for name, tensor in self._stored.items():
            if name not in used and not _UNUSED.fullmatch(name.rpartition(".")[2]):
                yield name, tensor

    def _find_parts(self, layout: Layout, name: str, tensor: StoredTensor) -> Mapping[str, StoredTensor] | None:
        """Return the tensors of the weight whose numbers are in `tensor`; None if they are not in this layout."""
        if tensor.kind not in layout.kinds or not name.endswith(layout.numbers):
            return None
        stem = name.removesuffix(layout.numbers)
        found = {end: self._stored.get(stem + end) for end in (layout.numbers, *layout.needed, *layout.optional)}
        parts = {end: part for end, part in found.items() if part is not None}
        return parts if all(end in parts for end in layout.needed) else None

    def restore(self, layout: Layout, parts: Mapping[str, StoredTensor]) -> Tensor:
        """Read a weight. Raises ValueError, and keeps its text, because transformers would hide it.

        Also keeps and raises an error for lack of memory, which says nothing about the checkpoint.
        """
        try:
            weight = layout.restore({end: part[...] for end, part in parts.items()}, self._declared)
            if not torch.isfinite(weight).all():
                raise ValueError("a number or a scale is infinite or NaN")
        except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                self.no_memory = error
                raise
            text = " ".join(str(error).split())[:200]
            self.failure = self.failure or f"{parts[layout.numbers].name}: {text}"
            raise ValueError(self.failure) from error
        return weight


class _Restored:
    """A weight that is restored when it is read with `weight[...]`."""

    def __init__(self, restoring: Restoring, layout: Layout, parts: Mapping[str, StoredTensor]) -> None:
        self._restoring, self._layout, self._parts = restoring, layout, parts

    def __getitem__(self, whole: Any) -> Tensor:
        return self._restoring.restore(self._layout, self._parts)
