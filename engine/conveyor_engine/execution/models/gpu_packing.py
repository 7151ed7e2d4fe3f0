"""Packs the weights of linear layers in 8 or 4 bits for a GPU, one layer after another. Called by `start`.

The model is still in the host's memory. Each weight is moved to the GPU, packed there and freed, so the GPU never has
more than one weight in 16 bits beside those that keep 16. Numbers of the checkpoint are kept exactly; others are
rounded, with the same scales as on a CPU. For the first layer of each kind, the kernels are compared with a plain
product. If the results differ, all such layers keep 16 bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import Quantization
from conveyor_engine.execution.kernels.few_rows import Norm
from conveyor_engine.execution.kernels.weights import Kind, Weights, pack_weights, take_outputs
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.latent import EXPANDING
from conveyor_engine.execution.models.quantize import check_share, choose_bits, find_share
from conveyor_engine.execution.models.quantized.rounding import Grid, choose_grid, find_group
from conveyor_engine.execution.models.trial import random, same
from conveyor_process.log import quote

_AT_ONCE = 2**24  # numbers rounded at once, which bounds the memory beside the weights
_KINDS: Final[dict[tuple[int, bool], Kind]] = {(4, False): "int4", (8, False): "int8", (8, True): "fp8"}
_TRIED_ROWS = (1, 16, 32, 64, 257)  # for each kernel and each size of its tiles
_TRIED_OUTPUTS = 4096  # bounds the memory of a trial
_EPS = 1e-6


def pack_linears(
    model: PreTrainedModel, quantization: Quantization | None, device: torch.device, progress: Callable[[str], None]
) -> None:
    """Replace the linear layers that the kernels can keep in few bits by `GpuLinear`. The others stay on the host.

    quantization: None keeps the bits of a quantized checkpoint, and rounds nothing. Raises ConfigError if it is set and
    most weights cannot be rounded.
    """
    packing = _Packing(model, quantization, device, progress)
    with torch.inference_mode():
        for path, linear in packing.find_linears():
            packing.pack(path, linear)
    for part in model.modules():  # no later module needs them
        vars(part).pop("grid", None)
        vars(part).pop("grids", None)
    share = find_share(model, packing.num_weights)
    if quantization:
        check_share(model, quantization, share)
    if packing.num_packed:
        progress(
            f"event=weights_rounded linears={packing.num_packed} kept={packing.num_kept} "
            f"mib={packing.num_bytes / 2**20:.0f} share={share:.2f}"
        )


@dataclass(slots=True)
class _Packing:
    model: PreTrainedModel
    quantization: Quantization | None
    device: torch.device
    progress: Callable[[str], None]
    num_packed: int = 0
    num_kept: int = 0
    num_weights: int = 0
    num_bytes: int = 0
    tried: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def find_linears(self) -> Iterator[tuple[str, nn.Linear]]:
        """Yield the layers that the checkpoint or `quantization` has in few bits.

        Without those that `latent` replaces.
        """
        for path, part in list(self.model.named_modules()):
            has_few_bits = self.quantization or getattr(part, "grid", None) is not None
            if has_few_bits and type(part) is nn.Linear and path.rpartition(".")[2] != EXPANDING:
                yield path, part

    def pack(self, path: str, linear: nn.Linear) -> None:
        """Replace a layer, or count it as kept."""
        grid: Grid | None = getattr(linear, "grid", None)
        linear.grid = None  # type: ignore[assignment]
        weight = linear.weight.data.to(self.device)
        if self.quantization:
            is_head = linear is self.model.get_output_embeddings()
            grid = _choose_grid(weight, choose_bits(self.quantization, is_head=is_head))
        elif grid is not None:
            grid = grid.replace(lambda part: part.to(self.device))
        packed = None if grid is None else _pack(weight, grid, is_exact=self.quantization is None)
        if packed is None or grid is None:
            self.num_kept += 1
            return
        bias = None if linear.bias is None else linear.bias.data.to(self.device)
        ours = GpuLinear(packed, bias, weight.dtype)
        if (key := (ours.kind, ours.in_features)) not in self.tried:
            self.tried[key] = self._try(ours, weight[:_TRIED_OUTPUTS], grid)
        if not self.tried[key]:
            self.num_kept += 1
            return
        self.model.set_submodule(path, ours)
        self.num_packed += 1
        self.num_weights += weight.numel()
        self.num_bytes += packed.num_bytes

    def _try(self, whole: GpuLinear, weight: torch.Tensor, grid: Grid) -> bool:
        """Return whether the kernels compute what torch computes with the plain weight of some outputs."""
        count = len(weight)
        weight = weight if self.quantization is None else _round(weight, grid.take(0, count))
        bias = None if whole.bias is None else whole.bias.data[:count]
        ours = GpuLinear(take_outputs(whole.packed, count), bias, whole.dtype)
        try:
            differs = next((f"{rows} rows" for rows in _TRIED_ROWS if not _is_same(ours, weight, rows)), "")
            differs = differs or ("" if same(weight, ours.weight) else "its weights")
        except Exception as error:  # a compiler or a driver that does not know the kernels
            checks.raise_if_of_device(error)
            differs = checks.on_one_line(error)
        if differs:
            found = f"{ours.packed.kind} in groups of {ours.packed.group}: {differs}"
            self.progress(f"event=weights_keep_16_bits found={quote(found)} consequence=more_memory_and_slower_answers")
        return not differs


def _is_same(ours: GpuLinear, weight: torch.Tensor, rows: int) -> bool:
    x, residual = random(rows, ours.in_features, like=weight), random(rows, len(weight), like=weight, seed=1)
    product = functional.linear(x, weight, ours.bias)
    if not same(product, ours(x)) or not same(product + residual, ours.add_to(residual, x)):
        return False
    return rows > 1 or _fuses_same(ours, weight, x, residual)


def _fuses_same(ours: GpuLinear, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Compare products of one row that have a norm before them, and a residual or an activation after them."""
    norm = Norm(random(ours.in_features, like=weight, seed=2), _EPS, 1.0)
    normed = functional.rms_norm(x.float(), x.shape[1:], norm.offset + norm.weight.float(), norm.eps).to(x.dtype)
    product = functional.linear(normed, weight, ours.bias)
    if not same(product + residual, ours.multiply_row(x, norm=norm, residual=residual)):
        return False
    if len(weight) % 2:
        return True
    gate, up = product.chunk(2, dim=-1)
    return same(functional.silu(gate) * up, ours.multiply_row(x, norm=norm, gated=True))


def _choose_grid(weight: torch.Tensor, bits: int) -> Grid | None:
    group = find_group(weight.shape[1], bits)
    if group is None:
        return None
    grids = [choose_grid(rows, bits, group) for rows in _split(weight)]
    return Grid(bits, torch.cat([each.scales for each in grids]))


def _pack(weight: torch.Tensor, grid: Grid, *, is_exact: bool) -> Weights | None:
    """Return the weight's numbers; None if it has others than the grid, or if there are no kernels for them.

    is_exact: whether the weight must have the values of the grid, but for the rounding of its type.
    """
    kind = _KINDS.get((grid.bits, grid.is_float))
    if kind is None or grid.factors is not None or grid.minima is not None or len(grid.scales) != len(weight):
        return None
    numbers, first = [], 0
    for rows in _split(weight):
        part = grid.take(first, len(rows))
        numbers.append(part.round(rows))
        if is_exact and not torch.equal(part.read(numbers[-1]).to(weight.dtype), rows):
            return None
        first += len(rows)
    scales, zeros = grid.scales, grid.zeros
    if not grid.is_float:  # `quantized.grids` repeats the scales of others for each group
        scales, zeros = _merge(scales), None if zeros is None else _merge(zeros)
    if zeros is not None and scales.shape != zeros.shape:
        scales, zeros = grid.scales, grid.zeros
    return pack_weights(kind, torch.cat(numbers), scales, zeros)


def _round(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    return grid.read(grid.round(weight)).to(weight.dtype)


def _merge(part: torch.Tensor) -> torch.Tensor:
    """Return one column if all are equal: the checkpoint has one scale for a row."""
    return part[:, :1] if torch.equal(part, part[:, :1].expand_as(part)) else part


def _split(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts: tuple[torch.Tensor, ...] = torch.split(weight, max(1, _AT_ONCE // weight.shape[1]))
    return parts
