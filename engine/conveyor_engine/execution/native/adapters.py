"""LoRA adapters of linear layers over packed weights: products for the columns that a step uses."""

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.native import library
from conveyor_engine.execution.native.packed import PANEL, pack_linear

_MANY = 32  # tokens


class AdapterWeights:
    """The matrices of all adapters of a linear layer, for slices of its outputs."""

    def __init__(self, down: torch.Tensor, slices: Sequence[tuple[slice, torch.Tensor]]) -> None:
        """down: (slices, columns, in), columns a multiple of PANEL. slices: outputs, second matrix (columns, size)."""
        number, columns, width = down.shape
        assert columns % PANEL == 0
        by_panel = down.view(number, columns // PANEL, PANEL, width).transpose(0, 1)
        down_packed = pack_linear(by_panel.reshape(-1, width))
        ups = [pack_linear(up.t().contiguous()) for _, up in slices]
        outputs = (ctypes.c_int64 * number)(*(of.start for of, _ in slices))
        calls = (library.Linear * number)(*(up.product(down.dtype) for up in ups))
        self._kept = (down_packed, ups, outputs, calls)  # the structure points to their memory
        self.in_features, self.dtype = width, down.dtype
        self.call = library.Adapters(down_packed.product(down.dtype), calls, ctypes.addressof(outputs), number)


class Columns:
    """The columns that the tokens of a step use."""

    def __init__(self, of_tokens: npt.NDArray[np.int32], ranges: npt.NDArray[np.int32]) -> None:
        """of_tokens: (T,), each token's adapter. ranges: (adapters, 2), first column and the one behind the last."""
        self.num_tokens = len(of_tokens)
        own = np.ascontiguousarray(ranges[of_tokens], dtype=np.int32)
        shares = np.array(list(_share(of_tokens, ranges)), dtype=np.int64)
        self._kept = (own, shares)  # the structure points to their memory
        self.call = library.Columns(own.ctypes.data, shares.ctypes.data, len(shares))


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
        x=x.data_ptr(), y=y.data_ptr(), rows=len(x), x_stride=x.stride(0), y_stride=y.stride(0),
        dtype=library.DTYPES[x.dtype],
    )  # fmt: skip
    call = library.Adapt(ctypes.pointer(product), ctypes.pointer(weights.call), ctypes.pointer(columns.call))
    library.load().cv_run_adapt(call)
