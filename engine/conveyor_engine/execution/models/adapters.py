"""Adds LoRA adapters to the outputs of linear layers, for batches in which each token may use another adapter.

`adapt` wraps a model's linear layers in `AdaptedLinear`. Before each forward, `tasks.generate` tells `Adapters` which
adapter each token uses.

The matrices of all adapters lie side by side, so that a layer takes two products for the whole batch, however many
adapters its tokens use. The first product computes all columns (ranks of all adapters) for all tokens. Then the columns
of other adapters than the token's own are set to 0. The shapes depend only on the number of tokens, so CUDA graphs can
capture this. Without a graph, only the columns of adapters that the step uses are computed. In a step without adapters,
the wrapped layers compute what they compute without a wrapper.

Adapters come and go between steps. A new one gets columns that are free, so that the others stay where they are, also
for graphs.

Compare S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547), whose kernels gather the matrices of each token: their
work does not grow with the number of adapters, but prompts are slower.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.interface import Paged, PagedStep
from conveyor_engine.execution.models.adapter_files import Factors
from conveyor_engine.execution.models.packed_linear import PackedLinear
from conveyor_engine.execution.transfer import to_device


class Adapters:
    """The adapters of a model, and those that the tokens of the current step use.

    An adapter has a number from 1 on, which no later adapter gets. Number 0 means that a token uses none.
    """

    def __init__(self, device: torch.device, *, is_native: bool = False) -> None:
        """is_native: whether compiled kernels compute layers with adapters."""
        self._device, self._is_native = device, is_native
        self._ranges = np.zeros((1, 2), dtype=np.int32)  # of columns, by the adapter's number
        self._owners_host = np.zeros(0, dtype=np.int32)  # the adapter that each column belongs to; -1: it is free
        self._owners = to_device(self._owners_host, device)
        self.columns: torch.Tensor | None = None  # those that this step computes; None: all
        self._of_tokens: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self._others: torch.Tensor | None = None  # (T, columns): whether the column is of another adapter
        self._part: slice | None = None  # see `narrow`
        self._native_columns: dict[int | tuple[int, int], native.Columns] = {}  # by the number of tokens, or by part

    @property
    def num_columns(self) -> int:
        return len(self._owners_host)

    def find_free(self, rank: int) -> slice:
        """Return the first neighbouring columns that are free. They may lie behind those that there are."""
        start = 0
        for first, end in sorted(self._ranges[self._ranges[:, 0] < self._ranges[:, 1]].tolist()):
            if first - start >= rank:
                break
            start = end
        return slice(start, start + rank)

    def grow(self, num_columns: int) -> None:
        """Have so many columns from now on, as all layers must. A multiple of PANEL, which the kernels need."""
        free = np.full(num_columns - self.num_columns, -1, dtype=np.int32)
        self._owners_host = np.append(self._owners_host, free)
        self._owners = to_device(self._owners_host, self._device)

    def take(self, number: int, columns: slice) -> None:
        """Give free columns to an adapter."""
        missing = number + 1 - len(self._ranges)
        self._ranges = np.pad(self._ranges, ((0, max(0, missing)), (0, 0)))
        self._ranges[number] = columns.start, columns.stop
        self._set_owner(columns, number)

    def release(self, number: int) -> None:
        """Free the columns of an adapter that no token uses any more."""
        self._set_owner(slice(*self._ranges[number].tolist()), -1)
        self._ranges[number] = 0

    def _set_owner(self, columns: slice, number: int) -> None:
        self._owners_host[columns] = number
        self._owners[columns] = number  # in place, because graphs read it

    @property
    def is_used(self) -> bool:
        """Return whether a token of the current step may use an adapter."""
        return self._of_tokens is not None

    def begin_step(self, of_rows: torch.Tensor, num_tokens: int, paged: Paged, used: Sequence[int] | None) -> None:
        """Begin the next forward. of_rows: (rows,), the number of each row's adapter. used: see `begin`."""
        if isinstance(paged, PagedStep):
            assert paged.token_rows is not None
            self.begin(of_rows[paged.token_rows], used, None if paged.last is None else paged.last.tokens)
        else:  # a measurement: all tokens use one
            self.begin(of_rows.new_ones(num_tokens), used)

    def begin(self, of_tokens: torch.Tensor, used: Sequence[int] | None, last: torch.Tensor | None = None) -> None:
        """Begin a step. Waits for nothing on the device.

        of_tokens: (T,), the number of each token's adapter. used: all numbers in it except 0; None: not known. last:
        the tokens that the last layer computes after its attention; None: all.
        """
        self.columns = self._of_tokens = self._last = self._others = self._part = None
        self._native_columns = {}
        if used is not None and not used:
            return
        self._of_tokens, self._last = of_tokens, last
        if self._is_native:
            self._begin_native(of_tokens.numpy())
            return
        owners = self._owners
        if used is not None:
            self.columns = to_device(np.flatnonzero(np.isin(self._owners_host, used)), self._device)
            owners = owners[self.columns]
        self._others = of_tokens[:, None] != owners

    def _begin_native(self, of_tokens: npt.NDArray[np.int32]) -> None:
        inputs = [of_tokens] if self._last is None else [of_tokens[self._last.numpy()], of_tokens]
        self._native_columns = {len(tokens): native.Columns(tokens, self._ranges) for tokens in inputs}

    @contextmanager
    def narrow(self, begin: int, end: int) -> Iterator[None]:
        """While the context is open, the inputs of layers have only these tokens of the step."""
        self._part = slice(begin, end)
        try:
            yield
        finally:
            self._part = None

    def columns_of(self, num_tokens: int) -> native.Columns | None:
        """Return the columns of a layer's input for the compiled kernels; None if no token uses an adapter.

        The input has all tokens, those of `narrow`, or those of the last layer.
        """
        if self._of_tokens is None:
            return None
        if self._part is None:
            return self._native_columns[num_tokens]
        key = self._part.start, self._part.stop
        if key not in self._native_columns:
            self._native_columns[key] = native.Columns(self._of_tokens[self._part].numpy(), self._ranges)
        return self._native_columns[key]

    def others_of(self, num_tokens: int) -> torch.Tensor:
        """Return (num_tokens, columns) for a layer's input: whether each column is of another adapter than the token's.

        The input has all tokens, those of `narrow`, or those of the last layer.
        """
        assert self._of_tokens is not None
        if self._others is None:  # beside compiled layers, a layer that they cannot compute
            self._others = self._of_tokens[:, None] != self._owners
        if self._part is not None:
            return self._others[self._part]
        if num_tokens == len(self._others):
            return self._others
        assert self._last is not None
        return self._others[self._last]


class AdaptedLinear(nn.Module):
    """A linear layer, x (1, T, in) -> (1, T, out), with adapters for slices of its output."""

    def __init__(
        self,
        part: nn.Linear | PackedLinear,
        adapters: Adapters,
        slices: Sequence[slice],
        num_columns: int,
        like: tuple[torch.device, torch.dtype],
    ) -> None:
        """part: the layer without adapters. num_columns: of all adapters. like: of the matrices, which are 0."""
        super().__init__()
        self.part, self.adapters, self.slices, self.dtype = part, adapters, slices, like[1]
        self.num_reduced = len(slices) * num_columns  # numbers for each token between the two products
        self._allocate(num_columns, *like)

    def _allocate(self, num_columns: int, device: torch.device, dtype: torch.dtype) -> None:
        width = self.part.in_features
        self._down = torch.zeros(len(self.slices), num_columns, width, device=device, dtype=dtype)
        self._ups = [
            torch.zeros(num_columns, outputs.stop - outputs.start, device=device, dtype=dtype)
            for outputs in self.slices
        ]

    def take(self, other: "AdaptedLinear") -> None:
        """Copy the matrices of a layer with the same slices first, and with fewer slices or columns."""
        number, columns = other._down.shape[:2]
        self._down[:number, :columns] = other._down
        for mine, theirs in zip(self._ups, other._ups, strict=False):
            mine[:columns] = theirs

    def write(self, columns: slice, factors: Sequence[Factors | None]) -> None:
        """Set an adapter's columns. factors: for each slice; None: the adapter does not change it."""
        for index, (of_slice, up) in enumerate(zip(factors, self._ups, strict=True)):
            self._down[index, columns] = up[columns] = 0
            if of_slice is not None:
                own = slice(columns.start, columns.start + len(of_slice.down))
                self._down[index, own], up[own] = of_slice.down, of_slice.up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(x)
        if self.adapters.is_used:
            self._add_adapters(out.view(-1, out.shape[-1]), x.flatten(0, -2))
        return out

    def _add_adapters(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add to out (T, out) what each token's adapter makes of x (T, in)."""
        columns = self.adapters.columns
        down = self._down[:, : self.adapters.num_columns] if columns is None else self._down[:, columns]
        reduced = (x @ down.flatten(0, 1).t()).view(len(x), *down.shape[:2])
        # Not a product with 0: one adapter's infinity would become the other tokens' NaN.
        reduced.masked_fill_(self.adapters.others_of(len(x))[:, None], 0)
        for index, (outputs, up) in enumerate(zip(self.slices, self._ups, strict=True)):
            out[:, outputs].addmm_(
                reduced[:, index], up[: self.adapters.num_columns] if columns is None else up[columns]
            )


class NativeAdaptedLinear(AdaptedLinear):
    """The same with the compiled kernels."""

    def _allocate(self, num_columns: int, device: torch.device, dtype: torch.dtype) -> None:
        self.weights = native.AdapterWeights(self.part.in_features, self.slices, num_columns, dtype)

    def take(self, other: AdaptedLinear) -> None:
        assert isinstance(other, NativeAdaptedLinear)
        self.weights.take(other.weights)

    def write(self, columns: slice, factors: Sequence[Factors | None]) -> None:
        rank = columns.stop - columns.start
        for index, (of_slice, outputs) in enumerate(zip(factors, self.slices, strict=True)):
            down = torch.zeros(rank, self.part.in_features, dtype=self.weights.dtype)
            up = torch.zeros(rank, outputs.stop - outputs.start, dtype=self.weights.dtype)
            if of_slice is not None:
                down[: len(of_slice.down)], up[: len(of_slice.up)] = of_slice.down, of_slice.up
            self.weights.write(index, columns.start, down, up)

    def _add_adapters(self, out: torch.Tensor, x: torch.Tensor) -> None:
        columns = self.adapters.columns_of(len(x))
        assert columns is not None
        native.add_adapters(out, x, self.weights, columns)


def without_adapters(linear: nn.Module) -> nn.Module:
    """Return the layer that computes the same in this step: the wrapped one if no token uses an adapter."""
    return linear.part if isinstance(linear, AdaptedLinear) and not linear.adapters.is_used else linear
