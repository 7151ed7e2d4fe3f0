"""LoRA adapters of linear layers over packed weights: products for the columns that a step uses."""

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from conveyor_engine.execution.native import library
from conveyor_engine.execution.native.packed import PANEL, allocate

_MANY = 32  # tokens
_PAIR = {torch.float32: 1, torch.bfloat16: 2}  # neighbours of a row of packed weights that are stored together


class AdapterWeights:
    """The matrices of all adapters of a linear layer, for slices of its outputs. They are 0 until `write` sets them."""

    def __init__(self, in_features: int, outputs: Sequence[slice], columns: int, dtype: torch.dtype) -> None:
        """outputs: the slices. columns: of all adapters together, a multiple of PANEL."""
        number = len(outputs)
        assert columns % PANEL == 0
        self._down = allocate(number * columns, in_features, dtype)
        self._skipped = [of.start % PANEL for of in outputs]  # the panels of a slice are those of the layer's outputs
        self._ups = [
            allocate(skipped + of.stop - of.start, columns, dtype)
            for of, skipped in zip(outputs, self._skipped, strict=True)
        ]
        starts = (ctypes.c_int64 * number)(*(of.start for of in outputs))
        calls = (library.Linear * number)(*(up.product(dtype) for up in self._ups))
        for call, of in zip(calls, outputs, strict=True):
            call.n = of.stop - of.start
        self._kept = (starts, calls)  # the structure points to their memory
        self.in_features, self.dtype, self._num_slices = in_features, dtype, number
        self.call = library.Adapters(self._down.product(dtype), calls, ctypes.addressof(starts), number)

    def take(self, other: "AdapterWeights") -> None:
        """Set the matrices of another object with the same slices first, and with fewer slices or columns."""
        panels = other._down.data.view(-1, other._num_slices, *other._down.data.shape[1:])
        self._down.data.view(-1, self._num_slices, *panels.shape[2:])[: len(panels), : other._num_slices] = panels
        for mine, theirs in zip(self._ups, other._ups, strict=False):
            mine.data[:, : theirs.data.shape[1]] = theirs.data

    def write(self, index: int, first: int, down: torch.Tensor, up: torch.Tensor) -> None:
        """Set the matrices of slice `index` from column `first` on: down (columns, in), up (columns, size)."""
        columns = torch.arange(first, first + len(down))
        panels, rows = columns // PANEL, columns % PANEL
        whole, pair = self._down.data.shape[1], _PAIR[self.dtype]
        by_panel = self._down.data.view(-1, self._num_slices, whole // pair, PANEL, pair)
        by_panel[panels, index, :, rows] = functional.pad(down, (0, whole - down.shape[1])).view(len(down), -1, pair)
        size, skipped = len(self._ups[index].data) * PANEL, self._skipped[index]
        by_pair = self._ups[index].data.view(size // PANEL, -1, PANEL, pair)
        by_pair[:, columns // pair, :, columns % pair] = functional.pad(
            up, (skipped, size - skipped - up.shape[1])
        ).view(len(up), -1, PANEL)


class Columns:
    """The columns that the tokens of a step use."""

    def __init__(self, of_tokens: npt.NDArray[np.int32], ranges: npt.NDArray[np.int32]) -> None:
        """of_tokens: (T,), each token's adapter. ranges: (adapters, 2), first column and the one behind the last."""
        self.num_tokens = len(of_tokens)
        own = np.ascontiguousarray(ranges[of_tokens], dtype=np.int32)
        shares = np.array(list(_share(of_tokens, ranges)), dtype=np.int64)
        self._kept = (own, shares)  # the structure points to their memory
        panels = int(np.max(-(-own[:, 1] // PANEL) - own[:, 0] // PANEL, initial=0))
        self.call = library.Columns(own.ctypes.data, shares.ctypes.data, len(shares), panels)


def _share(of_tokens: npt.NDArray[np.int32], ranges: npt.NDArray[np.int32]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the first token, the one behind the last, and the same of the panels that these tokens use.

    Many neighbours with the same adapter have a share of their own, without the columns of other adapters. The tokens
    between have shares together: one for each run of panels. Many neighbours without an adapter have no share.
    """
    starts = np.concatenate(([0], np.flatnonzero(np.diff(of_tokens)) + 1, [len(of_tokens)]))
    done = 0
    for index in np.flatnonzero(np.diff(starts) >= _MANY):
        first, end = starts[index : index + 2].tolist()
        yield from _join(done, first, of_tokens, ranges)
        yield from _join(first, end, of_tokens, ranges)
        done = end
    yield from _join(done, len(of_tokens), of_tokens, ranges)


def _join(
    first: int, end: int, of_tokens: npt.NDArray[np.int32], ranges: npt.NDArray[np.int32]
) -> Iterator[tuple[int, int, int, int]]:
    """Yield a share of these tokens for each run of panels that they use."""
    used = ranges[np.unique(of_tokens[first:end])]
    used = used[used[:, 0] < used[:, 1]]
    used = used[np.argsort(used[:, 0])]  # a later adapter may have got earlier columns
    panels: list[tuple[int, int]] = []
    for begin, behind in zip((used[:, 0] // PANEL).tolist(), (-(-used[:, 1] // PANEL)).tolist(), strict=True):
        start = panels.pop()[0] if panels and begin <= panels[-1][1] else begin
        panels.append((start, behind))
    return ((first, end, *run) for run in panels)


def add_adapters(y: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, columns: Columns) -> None:
    """Add to y (T, out) what each token's adapter makes of x (T, in). Both have contiguous rows."""
    assert x.stride(1) == y.stride(1) == 1
    assert x.dtype == y.dtype == weights.dtype
    assert len(x) == len(y) == columns.num_tokens
    assert x.shape[1] == weights.in_features
    product = library.Linear(
        x=x.data_ptr(), residual=y.data_ptr(), y=y.data_ptr(), rows=len(x), n=y.shape[1], x_stride=x.stride(0),
        y_stride=y.stride(0), dtype=library.DTYPES[x.dtype],
    )  # fmt: skip
    call = library.Adapt(ctypes.pointer(product), ctypes.pointer(weights.call), ctypes.pointer(columns.call))
    library.load().cv_run_adapt(call)
