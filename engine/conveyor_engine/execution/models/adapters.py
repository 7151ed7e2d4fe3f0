"""Adds LoRA adapters to the outputs of linear layers, for batches in which each token may use another adapter.

`adapt` wraps a model's linear layers in `AdaptedLinear`. Before each forward, `runners.generate` tells `Adapters` which
adapter each token uses.

The matrices of all adapters lie side by side, so that a layer takes two products for the whole batch, however many
adapters its tokens use. The first product computes all columns (ranks of all adapters) for all tokens. Then the columns
of other adapters than the token's own are set to 0. The shapes depend only on the number of tokens, so CUDA graphs can
capture this. Without a graph and without compiled kernels, only the columns of adapters that the step uses are
computed. In a step without adapters, the wrapped layers compute what they compute without a wrapper.

Compare S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547), whose kernels gather the matrices of each token: their
work does not grow with the number of adapters, but prompts are slower.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.transfer import to_device


class Adapters:
    """The adapters of a model, which have the numbers 1 to N, and those that the tokens of the current step use.

    Number 0 means that a token uses none.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device, *, selects: bool = True) -> None:
        """ranks: of each adapter, in order. selects: whether steps may compute a part of the columns."""
        self._device, self._number, self._selects = device, len(ranks), selects
        self._owners_host = np.repeat(np.arange(1, len(ranks) + 1, dtype=np.int32), ranks)
        self._owners = to_device(self._owners_host, device)
        self.columns: torch.Tensor | None = None  # those that this step computes; None: all
        self._others: torch.Tensor | None = None  # (T, columns): whether the column is of another adapter
        self._last: torch.Tensor | None = None

    @property
    def num_columns(self) -> int:
        return len(self._owners_host)

    @property
    def is_used(self) -> bool:
        """Return whether a token of the current step may use an adapter."""
        return self._others is not None

    def begin(self, of_tokens: torch.Tensor, used: Sequence[int] | None, last: torch.Tensor | None = None) -> None:
        """Begin a step. Waits for nothing on the device.

        of_tokens: (T,), the number of each token's adapter. used: all numbers in it except 0; None: not known. last:
        the tokens that the last layer computes after its attention; None: all.
        """
        self.columns = self._others = self._last = None
        if used is not None and not used:
            return
        owners = self._owners
        if self._selects and used is not None and len(used) < self._number:
            self.columns = to_device(np.flatnonzero(np.isin(self._owners_host, used)), self._device)
            owners = owners[self.columns]
        self._others, self._last = of_tokens[:, None] != owners, last

    def others_of(self, num_tokens: int) -> torch.Tensor:
        """Return (num_tokens, columns) for a layer's input: whether each column is of another adapter than the token's.

        The input has all tokens, or those of the last layer.
        """
        assert self._others is not None
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
        self._outputs = [outputs for outputs, _ in slices]
        self._keep(down, [up for _, up in slices])

    def _keep(self, down: torch.Tensor, ups: list[torch.Tensor]) -> None:
        self._down, self._ups = down, ups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(x)
        if self.adapters.is_used:
            tokens = x.flatten(0, -2)
            reduced = self._reduce(tokens)
            reduced = reduced.view(len(tokens), len(self._outputs), reduced.shape[1] // len(self._outputs))
            # Not a product with 0: one adapter's infinity would become the other tokens' NaN.
            reduced.masked_fill_(self.adapters.others_of(len(tokens))[:, None], 0)
            flat = out.view(len(tokens), out.shape[-1])
            for index, outputs in enumerate(self._outputs):
                self._add(flat[:, outputs], reduced[:, index], index)
        return out

    def _reduce(self, tokens: torch.Tensor) -> torch.Tensor:
        """Multiply by the first matrices: (T, in) -> (T, slices * columns)."""
        columns = self.adapters.columns
        down = self._down if columns is None else self._down[:, columns]
        return tokens @ down.flatten(0, 1).t()

    def _add(self, out: torch.Tensor, reduced: torch.Tensor, index: int) -> None:
        """Multiply by the second matrices of a slice, and add the result: (T, columns) -> (T, size)."""
        columns, up = self.adapters.columns, self._ups[index]
        out.addmm_(reduced, up if columns is None else up[columns])


class NativeAdaptedLinear(AdaptedLinear):
    """The same with the compiled kernels, which compute all columns in every step."""

    def _keep(self, down: torch.Tensor, ups: list[torch.Tensor]) -> None:
        self._packed_down = native.pack_linear(down.flatten(0, 1))
        self._packed_ups = [native.pack_linear(up.t().contiguous()) for up in ups]

    def _reduce(self, tokens: torch.Tensor) -> torch.Tensor:
        return native.linear(tokens, self._packed_down)

    def _add(self, out: torch.Tensor, reduced: torch.Tensor, index: int) -> None:
        native.add_linear(out, reduced, self._packed_ups[index])


def without_adapters(linear: nn.Module) -> nn.Module:
    """Return the layer that computes the same in this step: the wrapped one if no token uses an adapter."""
    return linear.part if isinstance(linear, AdaptedLinear) and not linear.adapters.is_used else linear
