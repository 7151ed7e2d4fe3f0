"""Joins items to batches, and splits the outputs of a batch by item. Used by `execution`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from conveyor_engine.tasks.custom.execution.tensors import DTYPES, read_tensor, write_tensor
from conveyor_engine.tasks.custom.model import Batch, Batching
from conveyor_engine.wire.tensors import Signature, Tensor, decode_elements, encode_elements

Item = Mapping[str, Tensor]


class Batches:
    """Joins and splits batches of one model."""

    def __init__(
        self, signature: Signature, batching: Batching, made_types: Mapping[str, torch.dtype], device: torch.device
    ) -> None:
        """made_types: the types of the inputs that this class creates, because clients do not send them."""
        self._signature, self._batching = signature, batching
        self._made_types, self._device = made_types, device
        self._types = {spec.name: spec.datatype for spec in signature.inputs}

    def group(self, items: Sequence[Item]) -> Iterable[list[int]]:
        """Return groups of indices. The items of a group share one call of the model."""
        if self._batching.ragged != "stack":
            return [list(range(len(items)))]
        groups: dict[Any, list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault(tuple((name, item[name].shape) for name in sorted(item)), []).append(index)
        return groups.values()

    def join(self, items: Sequence[Item]) -> Batch:
        """Return the batch of these items, which are one of the groups that `group` returns."""
        match self._batching.ragged:
            case "pack":
                batch = self._map(items, torch.cat)
            case "pad":
                batch = self._pad(items)
            case _:
                batch = self._map(items, torch.stack)
        return batch | {name: made.to(self._device) for name, made in self._make(items).items()}

    def split(self, computed: Batch, items: Sequence[Item]) -> list[dict[str, Tensor]]:
        """Return the outputs of each item. Raises ValueError if they do not match the signature."""
        found: list[dict[str, Tensor]] = [{} for _ in items]
        lengths = [self._bind(item) for item in items]
        for spec in self._signature.outputs:
            if spec.name not in computed:
                raise ValueError(f"the model has given no output {spec.name!r}")
            rows = self._cut(spec.name, spec.shape, computed[spec.name], lengths)
            for item, row, bound in zip(found, rows, lengths, strict=True):
                tensor = row if isinstance(row, Tensor) else write_tensor(row)
                shape = [size if isinstance(size, int) else bound.get(size) for size in spec.shape]
                right = len(shape) == len(tensor.shape) and all(
                    size in (None, given) for size, given in zip(shape, tensor.shape, strict=True)
                )
                if tensor.datatype != spec.datatype or not right:
                    wrong = f"{tensor.datatype} {list(tensor.shape)}, not {spec.datatype} {list(spec.shape)}"
                    raise ValueError(f"the output {spec.name!r} of an item is {wrong}")
                item[spec.name] = tensor
        return found

    def _map(self, items: Sequence[Item], join: Any) -> Batch:
        batch: Batch = {}
        for name, datatype in self._types.items():
            if name not in items[0]:
                continue
            if datatype == "BYTES":
                batch[name] = [list(decode_elements(item[name].data)) for item in items]
            else:
                batch[name] = join([read_tensor(item[name]) for item in items]).to(self._device)
        return batch

    def _pad(self, items: Sequence[Item]) -> Batch:
        batch: Batch = {}
        for name, datatype in self._types.items():
            tensors = [read_tensor(item[name]) for item in items]
            shape = [len(items), *(max(sizes) for sizes in zip(*(each.shape for each in tensors), strict=True))]
            padded = torch.full(shape, self._batching.pad_values.get(name, 0), dtype=DTYPES[datatype])
            for row, tensor in zip(padded, tensors, strict=True):
                row[tuple(map(slice, tensor.shape))] = tensor
            batch[name] = padded.to(self._device)
        return batch

    def _make(self, items: Sequence[Item]) -> dict[str, torch.Tensor]:
        """Return the inputs that clients do not send: mask, lengths and offsets."""
        made: dict[str, torch.Tensor] = {}
        if not self._batching.made:
            return made
        lengths = torch.tensor([self.find_length(item) for item in items])
        if (name := self._batching.mask) is not None:
            positions = torch.arange(int(lengths.max()))
            made[name] = positions < lengths[:, None]
        if (name := self._batching.lengths) is not None:
            made[name] = lengths
        if (name := self._batching.offsets) is not None:
            made[name] = torch.tensor(list(accumulate(lengths.tolist(), initial=0)))
        return {name: tensor.to(self._made_types[name]) for name, tensor in made.items()}

    def find_length(self, item: Item) -> int:
        """Return the item's size in the first dimension whose length varies; 1 if no length varies."""
        return next(iter(self._bind(item).values()), 1)

    def _bind(self, item: Item) -> dict[str, int]:
        lengths: dict[str, int] = {}
        for spec in self._signature.inputs:
            if spec.name in item:
                self._signature.bind(spec, item[spec.name].shape, lengths)
        return lengths

    def _cut(
        self, name: str, shape: Sequence[int | str], computed: Any, lengths: Sequence[Mapping[str, int]]
    ) -> Sequence[Any]:
        """Return the part of an output that belongs to each item, without padding."""
        if isinstance(computed, list):
            pairs = zip(computed, lengths, strict=True)
            return [Tensor("BYTES", _fill(shape, bound), encode_elements(row)) for row, bound in pairs]
        if not isinstance(computed, torch.Tensor):
            raise ValueError(f"the output {name!r} is no tensor: {type(computed).__name__}")
        computed = computed.detach().cpu()
        if self._batching.ragged == "pack" and shape and shape[0] in self._signature.lengths:
            rows: Sequence[Any] = torch.split(computed, [bound[str(shape[0])] for bound in lengths])
        elif computed.dim() == 0 or len(computed) != len(lengths):
            raise ValueError(f"the output {name!r} has the shape {list(computed.shape)} for {len(lengths)} items")
        else:
            rows = list(computed)
        if self._batching.ragged != "pad":
            return rows
        return [
            row[tuple(slice(bound.get(size)) if isinstance(size, str) else slice(None) for size in shape)]
            for row, bound in zip(rows, lengths, strict=True)
        ]


def _fill(shape: Sequence[int | str], lengths: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else lengths[size] for size in shape)
