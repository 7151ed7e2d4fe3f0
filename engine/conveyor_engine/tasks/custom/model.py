"""The base class of models that are Python code, and the settings of how items are joined to a batch.

Users write subclasses, so everything here is public. `spec.engine.modelClass` names a class in the engine's image.
Does not import torch, so that every process can import this module.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from conveyor_engine.wire.tensors import Datatype, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Batch", "Batching", "Datatype", "Model", "TensorSpec"]

Batch = dict[str, "torch.Tensor | list[list[bytes]]"]
"""By name, a tensor of all items, on the model's device. Of `BYTES`, the elements of each item, in row-major order."""


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How items are joined to a batch. A `model.json` has the same fields."""

    ragged: Literal["stack", "pad", "pack"] = "stack"
    """What becomes of items of different lengths. stack: items of equal shapes share a call, others get their own. pad:
    each length is that of the longest item. pack: items follow each other without a dimension for the batch."""
    pad_values: dict[str, float] = {}
    """pad: what fills an input; default: 0."""
    mask: str | None = None
    """pad: an input that the engine makes, (batch, length): true where an item is, false where it is padded."""
    lengths: str | None = None
    """pad: an input that the engine makes, (batch,): the length of each item."""
    offsets: str | None = None
    """pack: an input that the engine makes, (batch + 1,): where each item begins, and where the last one ends."""
    outputs: tuple[str, ...] = ()
    """Names of a program's outputs, in their order; default: the keys of its dictionary, else output, or output_0 and
    so on. A class has names already."""

    @property
    def made(self) -> tuple[str, ...]:
        """The inputs that the engine makes and clients do not send."""
        return tuple(name for name in (self.mask, self.lengths, self.offsets) if name is not None)

    def find_conflict(self) -> str | None:
        """Return a sentence about settings that exclude each other; None if there are none."""
        if self.ragged != "pad" and (self.mask or self.lengths or self.pad_values):
            return '`pad_values`, `mask` and `lengths` are for `ragged: "pad"`'
        if (self.ragged == "pack") != (self.offsets is not None):
            return '`ragged: "pack"` and `offsets` need each other'
        return None


class Model(ABC):
    """A model of your own: its tensors, how it is loaded, and how it computes a batch.

    The engine makes one, calls `load` once, and then `run` in one thread for each batch. An exception of `run` fails
    the items that raise it when they are run alone, and no others.
    """

    inputs: ClassVar[Sequence[TensorSpec]]
    """What clients send, of one item: without the batch."""
    outputs: ClassVar[Sequence[TensorSpec]]
    """What they get. An output whose shape has the name of a length gets the item's own length back."""
    lengths: ClassVar[Mapping[str, tuple[int, int]]] = {}
    """The least and the most of each length that shapes name."""
    batching: ClassVar[Batching] = Batching()
    max_batch: ClassVar[int] = 2**31 - 1
    """Items of the largest batch that it takes; packed, the sum of their lengths."""

    def load(self, directory: Path, device: "torch.device") -> None:  # noqa: B027  a model may need nothing
        """Load the model. `directory` has the files of `spec.model.uri`."""

    @abstractmethod
    def run(self, batch: Batch) -> Batch:
        """Compute all outputs of a batch. Called in torch's inference mode."""
