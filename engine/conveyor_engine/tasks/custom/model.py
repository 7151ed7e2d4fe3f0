"""Defines the base class for models written in Python, and the settings for joining items to a batch.

Users write subclasses, so everything here is public. `spec.engine.modelClass` names a class in the engine's image. Does
not import torch, so that every process can import this module.
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
"""A batch by tensor name: one tensor for all items, on the model's device. For `BYTES`: a list of each item's elements,
in row-major order."""


class Batching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How items are joined to a batch. A `model.json` has the same fields."""

    ragged: Literal["stack", "pad", "pack"] = "stack"
    """How items of different lengths are joined. stack: items of equal shape share a call, other items get their own
    call. pad: each item is padded to the longest item. pack: items follow each other, without a batch dimension."""
    pad_values: dict[str, float] = {}
    """For pad: the value that fills the padding of an input, by name; default: 0."""
    mask: str | None = None
    """For pad: name of an input that the engine creates, (batch, length): true for the item, false for padding."""
    lengths: str | None = None
    """For pad: name of an input that the engine creates, (batch,): the length of each item."""
    offsets: str | None = None
    """For pack: name of an input that the engine creates, (batch + 1,): the start of each item, then the end of the
    last."""
    outputs: tuple[str, ...] = ()
    """Names of a program's outputs, in order; default: the keys of its dictionary; without one, output or
    output_0 and so on. Classes name their outputs already."""

    @property
    def made(self) -> tuple[str, ...]:
        """Return the names of the inputs that the engine creates and clients do not send."""
        return tuple(name for name in (self.mask, self.lengths, self.offsets) if name is not None)

    def find_conflict(self) -> str | None:
        """Return a sentence about settings that exclude each other; None if there are none."""
        if self.ragged != "pad" and (self.mask or self.lengths or self.pad_values):
            return '`pad_values`, `mask` and `lengths` are for `ragged: "pad"`'
        if (self.ragged == "pack") != (self.offsets is not None):
            return '`ragged: "pack"` and `offsets` need each other'
        return None


class Model(ABC):
    """Base class for your own model: declares its tensors, loads it, and computes batches.

    The engine creates one instance, calls `load` once, and then calls `run` for each batch, in one thread. If `run`
    raises an exception, the engine runs the items again in smaller batches, down to one item. An item fails only if
    `run` raises for this item alone.
    """

    inputs: ClassVar[Sequence[TensorSpec]]
    """The tensors that clients send for one item, without the batch dimension."""
    outputs: ClassVar[Sequence[TensorSpec]]
    """The tensors that clients get for one item. In an output's shape, the name of a length stands for the item's own
    length."""
    lengths: ClassVar[Mapping[str, tuple[int, int]]] = {}
    """Minimum and maximum of each length that the shapes name."""
    batching: ClassVar[Batching] = Batching()
    max_batch: ClassVar[int] = 2**31 - 1
    """The largest number of items that a batch may have; if packed, the largest sum of their lengths."""

    def load(self, directory: Path, device: "torch.device") -> None:  # noqa: B027  a model may need nothing
        """Load the model. `directory` has the files of `spec.model.uri`."""

    @abstractmethod
    def run(self, batch: Batch) -> Batch:
        """Compute all outputs of a batch. Called in torch's inference mode."""
