"""Adds LoRA adapters to the outputs of linear layers, for batches in which each token may use another adapter.

`adapt` wraps a model's linear layers in `AdaptedLinear`. Before each forward, `tasks.generate` tells `Adapters` which
adapter each token uses.

The matrices of all adapters lie side by side, so that a layer takes two products for the whole batch, however many
adapters its tokens use. The first product computes all columns (ranks of all adapters) for all tokens. Then the columns
of other adapters than the token's own are set to 0. The shapes depend only on the number of tokens, so CUDA graphs can
capture this. Without a graph, only the columns of adapters that the step uses are computed. In a step without adapters,
the wrapped layers compute what they compute without a wrapper.

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
from conveyor_engine.execution.transfer import to_device


class Adapters:
    """The adapters of a model, which have the numbers 1 to N, and those that the tokens of the current step use.

    Number 0 means that a token uses none.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, *, is_native: bool = False) -> None:
        """ranks: of each adapter, in order. is_native: whether compiled kernels compute layers with adapters."""
        self._device, self._number, self._is_native = device, len(ranks), is_native
        ends = np.cumsum([0, 0, *ranks], dtype=np.int32)
        self._ranges = np.stack((ends[:-1], ends[1:]), axis=1)  # of columns, by the adapter's number
        owners = np.repeat(np.arange(1, len(ranks) + 1, dtype=np.int32), ranks)
        unused = -len(owners) % native.PANEL if is_native else 0  # the kernels compute whole panels of columns
        self._owners_host = np.append(owners, np.full(unused, -1, dtype=np.int32))
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

    @property
    def is_used(self) -> bool:
        """Return whether a token of the current step may use an adapter."""
        return self._of_tokens is not None

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
        if used is not None and len(used) < self._number:
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
        self, part: nn.Module, adapters: Adapters, down: torch.Tensor, slices: Sequence[tuple[slice, torch.Tensor]]
    ) -> None:
        """part: the layer without adapters.

        down: (slices, columns, in). slices: for each of them, the outputs and the second matrices (columns, size).
        """
        super().__init__()
        self.part, self.adapters = part, adapters
        self.num_reduced = down.shape[0] * down.shape[1]  # numbers for each token between the two products
        self._keep(down, slices)

    def _keep(self, down: torch.Tensor, slices: Sequence[tuple[slice, torch.Tensor]]) -> None:
        self._down, self._slices = down, slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(x)
        if self.adapters.is_used:
            self._add_adapters(out.view(-1, out.shape[-1]), x.flatten(0, -2))
        return out

    def _add_adapters(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add to out (T, out) what each token's adapter makes of x (T, in)."""
        columns = self.adapters.columns
        down = self._down if columns is None else self._down[:, columns]
        reduced = (x @ down.flatten(0, 1).t()).view(len(x), *down.shape[:2])
        # Not a product with 0: one adapter's infinity would become the other tokens' NaN.
        reduced.masked_fill_(self.adapters.others_of(len(x))[:, None], 0)
        for index, (outputs, up) in enumerate(self._slices):
            out[:, outputs].addmm_(reduced[:, index], up if columns is None else up[columns])


class NativeAdaptedLinear(AdaptedLinear):
    """The same with the compiled kernels."""

    def _keep(self, down: torch.Tensor, slices: Sequence[tuple[slice, torch.Tensor]]) -> None:
        self.weights = native.AdapterWeights(down, slices)

    def _add_adapters(self, out: torch.Tensor, x: torch.Tensor) -> None:
        columns = self.adapters.columns_of(len(x))
        assert columns is not None
        native.add_adapters(out, x, self.weights, columns)


def without_adapters(linear: nn.Module) -> nn.Module:
    """Return the layer that computes the same in this step: the wrapped one if no token uses an adapter."""
    return linear.part if isinstance(linear, AdaptedLinear) and not linear.adapters.is_used else linear
