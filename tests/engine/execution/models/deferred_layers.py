"""Layers whose weights are in a checkpoint's files, in few bits, and what packs them."""

from dataclasses import replace
from typing import Any

import torch
from tests.engine.execution.interpreter import DEVICE
from torch import nn

from conveyor_engine.execution.models.gpu_packing import pack_model
from conveyor_engine.execution.models.quantized.deferred import Deferred
from conveyor_engine.execution.models.quantized.rounding import Grid


def pack(model: Any, quantization: Any = None) -> list[str]:
    """Pack and move a model. Return the lines of the log."""
    lines: list[str] = []
    pack_model(model, quantization, DEVICE, lines.append)
    model.to(DEVICE)
    return lines


def round_to(grid: Grid, weight: torch.Tensor) -> torch.Tensor:
    if not grid.is_float:
        return grid.round(weight)
    scaled = weight.view(*grid.scales.shape, -1) / grid.scales[..., None]
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).view(weight.shape)


class Numbers:
    """A weight in the checkpoint's files. Its numbers are the nearest ones to `weight`, if they are not given."""

    def __init__(self, grid: Grid, weight: torch.Tensor, numbers: torch.Tensor | None = None) -> None:
        self._grid, self._numbers = grid, round_to(grid, weight) if numbers is None else numbers
        self.shape = tuple(self._numbers.shape)

    def read(self) -> torch.Tensor:
        return self._grid.read(self._numbers)

    def read_grid(self, *, keeps_floats: bool) -> Grid:
        return replace(self._grid, numbers=lambda first, count: self._numbers[first : first + count])


def defer(linear: nn.Linear, grid: Grid, numbers: torch.Tensor | None = None) -> torch.Tensor:
    """Let a layer have its weight in a checkpoint's file, rounded to the grid. Return the rounded weight."""
    stored = Numbers(grid, linear.weight.data, numbers)
    linear.weight = nn.Parameter(Deferred.of(stored), requires_grad=False)
    return stored.read()
