"""The states of fixed size that layers without keys keep for each row, beside the paged KV cache.

Token mixers of transformers (gated delta nets, Mamba-2, short convolutions) keep the last inputs of a convolution and a
recurrent state. They read and write both through a `Cache`. `models.mixers` passes them a `StepStates` in its place,
which reads the states of some rows from pools and writes them back. `tasks.generate` allocates the pools.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from conveyor_engine.execution.transfer import to_device


class StateKey(NamedTuple):
    """Which state of a model: its layer, its kind (`conv` or `recurrent`), and its number in the layer."""

    layer: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one state for one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Shapes = dict[StateKey, StateShape]


def row_bytes(shapes: Shapes, *, copied: bool = False) -> int:
    """Return the bytes of all states of one row. copied: with a copy, to which the row can go back."""
    return (1 + copied) * sum(shape.num_bytes for shape in shapes.values())


def step_bytes(shapes: Shapes, num_rows: int) -> int:
    """Estimate the bytes that a step of so many rows needs, if transformers computes on copies of a layer's states."""
    by_layer: dict[int, int] = {}
    for key, shape in shapes.items():
        by_layer[key.layer] = by_layer.get(key.layer, 0) + shape.num_bytes
    return 4 * num_rows * max(by_layer.values(), default=0)


@dataclass(slots=True)
class States:
    """A pool of every state, (rows, *shape), and copies of some rows.

    The pools of layers with the same shape are one tensor, so one operation copies them.
    """

    pools: dict[StateKey, torch.Tensor]
    stacks: list[tuple[torch.Tensor, torch.Tensor]]  # (layers, rows, ...), and (layers, copies, ...)

    @classmethod
    def allocate(cls, shapes: Shapes, num_rows: int, device: torch.device, num_saved: int = 0) -> "States":
        """Allocate the pools, filled with zeros. num_saved: the most rows that are copied at once."""
        alike: dict[tuple[str, StateShape], list[StateKey]] = {}
        for key, state in shapes.items():
            alike.setdefault((key.kind, state), []).append(key)
        states = cls({}, [])
        for (kind, state), keys in alike.items():
            shape = state.shape[::-1] if kind == "conv" else state.shape  # channels lie side by side
            stack, saved = (
                torch.zeros((len(keys), number, *shape), dtype=state.dtype, device=device)
                for number in (num_rows, num_saved)
            )
            states.stacks.append((stack, saved))
            states.pools |= zip(keys, stack.transpose(2, 3) if kind == "conv" else stack, strict=True)
        return states

    def save(self, rows: Sequence[int]) -> None:
        """Copy the states of these rows."""
        for stack, saved in self.stacks:
            index = to_device(np.array(rows, dtype=np.int64), stack.device)
            torch.index_select(stack, 1, index, out=saved[:, : len(rows)])

    def restore(self, places: Iterable[tuple[int, int]]) -> None:
        """Give rows their copies back. places: (its place in the argument of `save`, row)."""
        for place, row in places:
            for stack, saved in self.stacks:
                stack[:, row] = saved[:, place]


class _CacheMethods:
    """What mixers use of transformers' `Cache` besides reading and writing. Older versions also read from `layers`."""

    has_states: ClassVar[bool]  # whether rows have states before the call

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.has_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        raise NotImplementedError

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        raise NotImplementedError

    @property
    def layers(self) -> "_Layers":
        return _Layers(self)


@dataclass(frozen=True, slots=True)
class _Layers:
    """A cache's layers, by number."""

    cache: _CacheMethods

    def __getitem__(self, layer: int) -> "_Layer":
        return _Layer(self.cache, layer)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The states of one layer, by number."""

    cache: _CacheMethods
    layer: int
    record_past: ClassVar[bool] = False

    @property
    def conv_states(self) -> "_Numbered":
        return _Numbered(partial(self.cache.get_conv_state, self.layer))

    @property
    def recurrent_states(self) -> "_Numbered":
        return _Numbered(partial(self.cache.get_recurrent_state, self.layer))


@dataclass(frozen=True, slots=True)
class _Numbered:
    """The states that `get` returns, by number."""

    get: Callable[[int], torch.Tensor | None]

    def __getitem__(self, number: int) -> torch.Tensor | None:
        return self.get(number)


@dataclass(slots=True)
class StateProbe(_CacheMethods):
    """A cache without states that records the shapes of those that mixers write."""

    shapes: Shapes = field(default_factory=dict)
    has_states: ClassVar[bool] = False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> torch.Tensor:
        shape = (*conv_states.shape[1:-1], conv_kernel_size)
        self.shapes[StateKey(layer_idx, "conv", state_idx)] = StateShape(shape, conv_states.dtype)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        shape = StateShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        self.shapes[StateKey(layer_idx, "recurrent", state_idx)] = shape
        return recurrent_states


class StepStates(_CacheMethods):
    """The states of some rows during one call of a mixer. `write_back` stores them in the pools.

    A row at its beginning has a state of zeros, whatever its last request left in the pools.
    """

    has_states: ClassVar[bool] = True

    def __init__(self, states: States, rows: torch.Tensor, is_new: torch.Tensor) -> None:
        """rows: int64 (n,). is_new: bool (n,), whether the row computes its first token in this step."""
        self._pools, self._rows, self._is_new = states.pools, rows, is_new
        self._held: dict[StateKey, torch.Tensor] = {}

    def _read(self, key: StateKey) -> torch.Tensor:
        """Return a copy of the state (n, *shape). Mixers may change it in place."""
        if key not in self._held:
            state = self._pools[key][self._rows]
            is_new = self._is_new.view(-1, *(1,) * (state.dim() - 1))
            self._held[key] = state.masked_fill_(is_new, 0)
        return self._held[key]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._read(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        key = StateKey(layer_idx, "recurrent", state_idx)
        return self._read(key) if key in self._pools else None

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        key = StateKey(layer_idx, "conv", state_idx)
        joined = torch.cat([self._read(key), conv_states], dim=-1)
        self._held[key] = joined[..., -self._pools[key].shape[-1] :]
        return joined

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._held[StateKey(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def write_back(self) -> None:
        for key, state in self._held.items():
            pool = self._pools[key]
            pool.index_copy_(0, self._rows, state.to(pool.dtype))
