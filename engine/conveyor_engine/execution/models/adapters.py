"""Adds LoRA adapters to the outputs of linear layers, for batches in which each token may use another adapter.

`adapt` wraps a model's linear layers in `AdaptedLinear`. Before each forward, `runners.generate` tells `Adapters` which
adapter each token uses.

The matrices of all adapters lie side by side, so that a layer takes two products for the whole batch, however many
adapters its tokens use. The first product computes all columns (ranks of all adapters) for all tokens. Then the columns
of other adapters than the token's own are set to 0. The shapes depend only on the number of tokens, so CUDA graphs can
capture this. Without a graph, only the columns of adapters that the step uses are computed. A step without adapters
costs nothing. Compare S-LoRA (arXiv 2311.03285) and Punica (arXiv 2310.18547), whose kernels gather the matrices of
each token: their work does not grow with the number of adapters, but prompts are slower.
"""

from collections.abc import Sequence

import torch
from torch import nn

BASE = 0  # the number of a token's adapter if it uses none


class Adapters:
    """The adapters of a model, which have the numbers 1 to N, and those that the tokens of the current step use."""

    def __init__(self, ranks: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        """ranks: of each adapter, in order."""
        self._device, self._dtype = device, dtype
        owners = [number for number, rank in enumerate(ranks, start=BASE + 1) for _ in range(rank)]
        self._owners = torch.tensor(owners, device=device)
        self.columns: torch.Tensor | None = None  # those that this step computes; None: all
        self._mask: torch.Tensor | None = None  # (T, columns): 1 if the token uses the column's adapter, otherwise 0
        self._last: torch.Tensor | None = None

    @property
    def num_columns(self) -> int:
        return len(self._owners)

    @property
    def is_used(self) -> bool:
        """Return whether a token of the current step may use an adapter."""
        return self._mask is not None

    def begin_base(self) -> None:
        """Begin a step without adapters."""
        self.columns = self._mask = self._last = None

    def begin(self, of_tokens: torch.Tensor, used: Sequence[int] | None, last: torch.Tensor | None = None) -> None:
        """Begin a step.

        of_tokens: (T,), the number of each token's adapter. used: all numbers in it except `BASE`; None: not known.
        last: the tokens that the last layer computes after its attention; None: all.
        """
        owners, self.columns = self._owners, None
        if used is not None and len(used) < int(self._owners[-1]):
            self.columns = torch.isin(owners, torch.tensor(used, device=self._device)).nonzero()[:, 0]
            owners = owners[self.columns]
        self._mask = (of_tokens[:, None] == owners).to(self._dtype)
        self._last = last

    def mask_for(self, num_tokens: int) -> torch.Tensor:
        """Return the mask (num_tokens, columns) for a layer's input: all tokens, or those of the last layer."""
        assert self._mask is not None
        return self._mask if num_tokens == len(self._mask) else self._mask[self._last]


class AdaptedLinear(nn.Module):
    """A linear layer, x (1, T, in) -> (1, T, out), with adapters for slices of its output."""

    def __init__(
        self, part: nn.Module, adapters: Adapters, down: torch.Tensor, slices: Sequence[tuple[slice, torch.Tensor]]
    ) -> None:
        """part: the layer without adapters.

        down: (slices, columns, in). slices: for each of them, the outputs and the second matrices (columns, size).
        """
        super().__init__()
        self.part = part
        self._adapters, self._down, self._slices = adapters, down, slices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.part(x)
        if not self._adapters.is_used:
            return out
        columns, down = self._adapters.columns, self._down
        if columns is not None:
            down = down[:, columns]
        tokens = x.flatten(0, -2)
        reduced = (tokens @ down.flatten(0, 1).t()).view(len(tokens), *down.shape[:2])
        reduced = reduced * self._adapters.mask_for(len(tokens))[:, None]
        flat = out.view(len(tokens), out.shape[-1])
        for index, (outputs, up) in enumerate(self._slices):
            flat[:, outputs].addmm_(reduced[:, index], up if columns is None else up[columns])
        return out
