"""Weights whose numbers are read when they are packed, and not while transformers loads the model.

`reading` gives such tensors to transformers. They have a shape and a type, and record what transformers' loader does
with them: joining, transposing, conversion. `fuse` and `gpu_packing` read one module after another. Before that, checks
of the model compute with random numbers in place of the weights (`stand_ins`), so that each weight is read once.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, Final, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from conveyor_engine.execution.models.quantized.rounding import Grid, Rows, widen_to_6_bits

_ops: Final = torch.ops.aten
# Operations that move whole numbers, and do not change them. Scales are moved alike.
_ARRANGING: Final = frozenset({
    _ops.alias, _ops.cat, _ops.chunk, _ops.clone, _ops.detach, _ops.index, _ops.index_select, _ops.select, _ops.slice,
    _ops.split, _ops.split_with_sizes, _ops.stack, _ops.unbind, _ops.unsqueeze, _ops.squeeze,
})  # fmt: skip
_CASTS: Final = frozenset({_ops._to_copy})
_ALIASES: Final = frozenset({_ops.alias, _ops.detach, _ops._to_copy})
_NUM_RANDOM: Final = 1_000_003  # a prime, so that no two rows of a matrix are alike
_FEW_ROWS: Final = 1024  # of a head in checks: logits of further tokens would show nothing more
_numbers = count(1)


class Stored(Protocol):
    """A weight in the checkpoint's files."""

    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """Return the weight. Raises ModelError if it is damaged."""

    def read_grid(self, *, keeps_floats: bool) -> Grid | None:
        """Return its scales, and a function that reads its numbers; None if the kernels have no numbers like these.

        keeps_floats: whether they have FP8 and FP4.
        """


class _Mode:
    is_loading = False  # every operation is recorded
    has_stand_ins = False
    keeps_stand_ins = False


class Deferred(Tensor):
    """A tensor that is a weight of the checkpoint, or the result of an operation on such tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, origin: "Stored | _Operation") -> Self:
        """like: has the shape, the strides and the type."""
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        return made

    def __init__(self, like: Tensor, origin: "Stored | _Operation") -> None:
        self._like, self._origin = like, origin
        self._value: Tensor | None = None
        self._stand_in: Tensor | None = None
        self.number: int | None = None  # of a parameter of the model; the seed of its random numbers
        self.is_table = False  # whether it is an embedding, or the head

    @classmethod
    def of(cls, stored: Stored) -> "Deferred":
        return cls(torch.empty(stored.shape, dtype=torch.float32, device="meta"), stored)

    def read(self) -> Tensor:
        """Return the numbers, and keep them. Raises ModelError if the checkpoint is damaged."""
        if self._value is None:
            self._value = self._compute(lambda part: part._value if part._value is not None else part._read())
        return self._value

    def _read(self) -> Tensor:
        return self._compute(Deferred._read)

    def _compute(self, get: Callable[["Deferred"], Tensor]) -> Tensor:
        return self._origin.run(get) if isinstance(self._origin, _Operation) else self._origin.read()

    def forget(self) -> None:
        """Drop what was read."""
        self._value = self._stand_in = None

    def now(self) -> Tensor:
        """Return the numbers with which a check computes now: the weight's, or random ones."""
        if not _Mode.has_stand_ins or self._value is not None:
            return self.read()
        made = self._stand_in
        if made is None:
            if self.number is None and isinstance(self._origin, _Operation):
                made = self._origin.run(Deferred.now)
            else:
                made = _make_stand_in(tuple(self.shape), self.dtype, self.number or 0, self.is_table)
            self._stand_in = made if _Mode.keeps_stand_ins else None
        return made

    def find_grid(self, *, keeps_floats: bool) -> Grid | None:
        """Return the values that the weight has, and a function that reads its numbers.

        Returns None if the kernels cannot keep the numbers. Rows of a grid are those of all dimensions but the last.
        keeps_floats: whether the kernels can keep FP8 and FP4.
        """
        grids = {stored: stored.read_grid(keeps_floats=keeps_floats) for stored in dict.fromkeys(self._list_stored())}
        found = [grid for grid in grids.values() if grid is not None]
        if len(found) < len(grids) or not all(grid.is_finite for grid in found):
            return None
        if len({grid.kind for grid in found}) > 1:
            if any(grid.factors is None or grid.is_float for grid in found):
                return None
            found = [widen_to_6_bits(grid) for grid in found]
        if any(grid.order is not None for grid in found) and any(each.shape[-1] != self.shape[-1] for each in grids):
            return None  # a share of the columns has columns of all groups
        of_stored, parts = dict(zip(grids, found, strict=True)), list[Tensor | None]()
        rows, columns, stored_columns = math.prod(self.shape[:-1]), self.shape[-1], next(iter(grids)).shape[-1]
        for number, part in enumerate(found[0].parts):
            if part is None:
                parts.append(None)
                continue
            try:
                arranged = self._arrange(of_stored, number).flatten(0, self.dim() - 2)
            except (_NotArrangedError, RuntimeError, IndexError):
                return None
            if (len(arranged), arranged.shape[1] * stored_columns) != (rows, part.shape[1] * columns):
                return None  # the columns are in another order, or divided within a group
            parts.append(arranged)
        return found[0].with_parts(parts, self._find_rows(of_stored))

    def _find_rows(self, grids: Mapping[Stored, Grid]) -> Rows:
        origin: Deferred | Stored = self
        while isinstance(origin, Deferred):
            made = origin._origin
            if isinstance(made, _Operation):
                if made.packet not in _ALIASES:
                    break
                origin = made.arguments[0]
            else:
                origin = made
        if not isinstance(origin, Deferred):
            rows = grids[origin].numbers
            assert rows is not None
            return rows  # read in parts, because tables are large
        read = cache(lambda: self._arrange(grids, None).flatten(0, self.dim() - 2))
        return lambda first, number: read()[first : first + number]

    def _list_stored(self) -> Iterator[Stored]:
        if not isinstance(self._origin, _Operation):
            yield self._origin
        else:
            for each in self._origin.parts:
                yield from each._list_stored()

    def _arrange(self, grids: Mapping[Stored, Grid], part: int | None) -> Tensor:
        """Do with a part of grids, or their numbers, what was done with the weights. Raises _NotArrangedError."""
        origin = self._origin
        if isinstance(origin, _Operation):
            if origin.packet in _CASTS:
                return origin.parts[0]._arrange(grids, part)
            if origin.packet is _ops.transpose and (plain := origin.parts[0]._find_turned(origin)) is not None:
                return plain._arrange(grids, part)
            if origin.packet not in _ARRANGING:
                raise _NotArrangedError
            return origin.run(lambda each: each._arrange(grids, part))
        found = grids[origin].read_all() if part is None else grids[origin].parts[part]
        assert found is not None
        return found.view(*origin.shape[:-1], *found.shape[1:])

    def _find_turned(self, last: "_Operation") -> "Deferred | None":
        """Return the weight of which this is the transposed one, and `last` transposes it back; None if it is none."""
        origin: Deferred | Stored = self
        while isinstance(origin, Deferred) and isinstance(origin._origin, _Operation):
            made = origin._origin
            if made.packet is _ops.transpose:
                turns = ({dim % self.dim() for dim in each.arguments[1:]} for each in (made, last))
                return made.parts[0] if len({frozenset(dims) for dims in turns}) == 1 else None
            if made.packet not in _ALIASES | {_ops.clone}:
                return None
            origin = made.parts[0]
        return None

    def data_ptr(self) -> int:
        """Return where the numbers are. Tensors without storage would return 0."""
        return self.now().data_ptr()

    def __deepcopy__(self, memo: object) -> nn.Parameter:
        return nn.Parameter(self.now().clone(), requires_grad=False)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if _Mode.is_loading or all(isinstance(each, Deferred) for each in tensors):
            recorded = _record(func, args, kwargs)
            if recorded is not None:
                return recorded
        few = func.overloadpacket is not _ops.embedding
        args, kwargs = tree_map_only(Deferred, lambda each: _cut(each, few), (args, kwargs))
        return func(*args, **kwargs)


class _Operation:
    """An operation whose arguments are deferred. index: of its results, if there are several."""

    def __init__(self, func: Any, arguments: Any, named: Any, index: int | None) -> None:
        self._func, self.arguments, self._named, self._index = func, arguments, named, index

    @property
    def packet(self) -> Any:
        return self._func.overloadpacket

    @property
    def parts(self) -> list[Deferred]:
        return [each for each in tree_leaves((self.arguments, self._named)) if isinstance(each, Deferred)]

    def run(self, get: Callable[[Deferred], Tensor]) -> Tensor:
        arguments, named = tree_map_only(Deferred, get, (self.arguments, self._named))
        out = self._func(*arguments, **named)
        result: Tensor = out if self._index is None else out[self._index]
        return result


class _NotArrangedError(Exception):
    """An operation changes numbers."""


def _record(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operation as deferred tensors; None if it has to be computed now."""
    if func._schema.is_mutable or kwargs.get("device") not in (None, torch.device("cpu")):
        return None
    on_meta = tree_map_only(
        Tensor, lambda each: each._like if isinstance(each, Deferred) else each.to("meta"), (args, kwargs)
    )
    try:
        out = func(*on_meta[0], **(on_meta[1] | ({"device": "meta"} if "device" in kwargs else {})))
    except (RuntimeError, NotImplementedError):  # its result depends on the numbers
        return None
    with torch.inference_mode(False):  # torch cannot make views of other tensors that are made in this mode
        if isinstance(out, Tensor):
            return Deferred(out, _Operation(func, args, kwargs, None))
        if isinstance(out, list | tuple) and all(isinstance(each, Tensor) for each in out):
            return [Deferred(each, _Operation(func, args, kwargs, number)) for number, each in enumerate(out)]
    return None


def _cut(weight: Deferred, few: bool) -> Tensor:
    now = weight.now()
    return now[:_FEW_ROWS] if few and weight.is_table and now is not weight._value else now


@contextmanager
def loading() -> Iterator[None]:
    """Record every operation on deferred tensors. transformers' loader, which has threads, runs in this."""
    _Mode.is_loading = True
    try:
        yield
    finally:
        _Mode.is_loading = False


@contextmanager
def stand_ins(*, keep: bool = False) -> Iterator[None]:
    """Compute with random numbers in place of weights that have not been read.

    keep: keep the numbers of a weight while the model has it, for checks of one module.
    """
    before = _Mode.has_stand_ins, _Mode.keeps_stand_ins
    _Mode.has_stand_ins, _Mode.keeps_stand_ins = True, keep
    try:
        yield
    finally:
        _Mode.has_stand_ins, _Mode.keeps_stand_ins = before


@cache
def _random_numbers() -> Tensor:
    return torch.randn(_NUM_RANDOM, generator=torch.Generator().manual_seed(0)).repeat(2)


def _make_stand_in(shape: tuple[int, ...], dtype: torch.dtype, number: int, is_table: bool) -> Tensor:
    """Return random numbers of this shape, the same for the same number, that keep the size of a product's inputs."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    begin, count = number * 7_919 % _NUM_RANDOM, min(rows * columns, _NUM_RANDOM)
    some: Tensor = (_random_numbers()[begin : begin + count] * columns**-0.5).to(dtype)
    if is_table:  # without memory
        return some.as_strided(shape, (max(1, (count - columns) // rows), 1))
    return some.repeat(-(-rows * columns // count))[: rows * columns].view(shape)


def number_weights(model: nn.Module, head: nn.Module | None, is_packed: Callable[[nn.Module], bool]) -> None:
    """Number the deferred weights of the modules that `fuse` may pack, and read all others."""
    for part in model.modules():
        packs = is_packed(part)
        for name, each in _list_deferred(part):
            if packs and each.dim() > 1:
                each.forget()
                each.number = each.number or next(_numbers)
                each.is_table |= isinstance(part, nn.Embedding) or part is head
            else:
                _put(part, name, nn.Parameter(each.read(), requires_grad=False))


def read_weights(model: nn.Module, device: torch.device | None = None) -> None:
    """Read all weights that are still deferred, and move each of them to the device. Tied weights stay one."""
    found: dict[Deferred, nn.Parameter] = {}
    for part in model.modules():
        for name, each in _list_deferred(part):
            if each not in found:
                found[each] = nn.Parameter(each.read().to(device=device), requires_grad=False)
                each.forget()
            _put(part, name, found[each])


def _list_deferred(part: nn.Module) -> list[tuple[str, Deferred]]:
    own = [*part._parameters.items(), *part._buffers.items()]
    return [(name, each) for name, each in own if isinstance(each, Deferred)]


def _put(part: nn.Module, name: str, value: nn.Parameter) -> None:
    if name in part._buffers:
        part._buffers[name] = value.data
    else:
        part._parameters[name] = value
