"""Packs weights in 8 or 4 bits for a GPU, those of one module after another. Called by `start`.

The model is on the host. The numbers of a quantized checkpoint are read from its files, moved to the GPU and packed
there, and are kept exactly. Weights in 16 bits are moved, rounded with the same scales as on a CPU, and freed. So
neither memory has more than one module in 16 bits beside those that keep 16. For the first module of each kind,
`gpu_trial` compares the kernels with a plain product. If the results differ, all such modules keep 16 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import Quantization
from conveyor_engine.execution.kernels.weights import Kind, Weights, has_kernels, pack_weights
from conveyor_engine.execution.models import checks
from conveyor_engine.execution.models.experts import find_clamps, is_gated
from conveyor_engine.execution.models.gpu_experts import GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.gpu_trial import compare_experts, compare_linear
from conveyor_engine.execution.models.latent import EXPANDING
from conveyor_engine.execution.models.quantize import check_share, choose_bits, find_share
from conveyor_engine.execution.models.quantized.deferred import Deferred, read_weights
from conveyor_engine.execution.models.quantized.rounding import Grid, choose_grid, find_group
from conveyor_process.log import quote

_AT_ONCE: Final = 2**24  # numbers that are moved or rounded at once, which bounds the memory beside the weights
_ROWS: Final = 64
_KINDS: Final[dict[tuple[int, bool], Kind]] = {
    (4, False): "int4",
    (5, False): "int8",
    (6, False): "int8",
    (8, False): "int8",
    (4, True): "fp4",
    (8, True): "fp8",
}


def pack_model(
    model: PreTrainedModel,
    quantization: Quantization | None,
    device: torch.device,
    progress: Callable[[str], None],
    after: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Replace linear layers and experts that the kernels can keep in few bits, and move all other deferred weights.

    quantization: None keeps the bits of a quantized checkpoint, and rounds nothing. after: called with the bytes of all
    packed weights after each module. Raises ConfigError if `quantization` is set and most weights cannot be rounded.
    """
    packing = _Packing(model, quantization, device, progress, after)
    with torch.inference_mode():
        for path, part in packing.find_parts():
            packing.pack(path, part)
        read_weights(model, device)
    share = find_share(model, packing.num_weights)
    if quantization:
        check_share(model, quantization, share)
    if packing.num_packed:
        progress(
            f"event=weights_rounded linears={packing.num_packed} kept={packing.num_kept} "
            f"mib={packing.num_bytes / 2**20:.0f} share={share:.2f} formats={','.join(sorted(packing.formats))}"
        )


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A weight (rows, in) on the device. numbers: uint8, one for each; `packed` has them in the kernels' order."""

    grid: Grid
    numbers: torch.Tensor
    packed: Weights

    def restore(self, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the plain weights of some rows."""
        weight = self.grid.take(first, count).read(self.numbers[first : first + count]).to(dtype)
        return weight if self.grid.order is None else weight[:, self.grid.order.argsort()]


@dataclass(slots=True)
class _Packing:
    model: PreTrainedModel
    quantization: Quantization | None
    device: torch.device
    progress: Callable[[str], None]
    after: Callable[[int], None]
    num_packed: int = 0
    num_kept: int = 0
    num_weights: int = 0
    num_bytes: int = 0
    formats: set[str] = field(default_factory=set)  # with the inputs that share a scale
    tried: dict[tuple[object, ...], bool] = field(default_factory=dict)

    def find_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the linear layers and experts that the checkpoint or `quantization` has in few bits.

        Without the linear layers that `latent` replaces.
        """
        for path, part in list(self.model.named_modules()):
            is_linear = type(part) is nn.Linear and path.rpartition(".")[2] != EXPANDING
            if not is_linear and not is_gated(part) and (self.quantization or find_clamps(part) is None):
                continue
            if self.quantization or all(isinstance(each, Deferred) for each in _list_matrices(part)):
                yield path, part

    def pack(self, path: str, part: nn.Module) -> None:
        """Replace a module, or count its matrices as kept."""
        matrices, found = _list_matrices(part), list[_Matrix]()
        for matrix in matrices:
            if (packed := self._pack(part, matrix)) is None:
                break
            found.append(packed)
        ours = self._build(part, found) if len(found) == len(matrices) else None
        num_matrices = sum(each.shape[:-2].numel() for each in matrices)
        if ours is None:
            self.num_kept += num_matrices
            return
        self.num_packed += num_matrices
        self.formats.update(f"{each.packed.kind}/{each.packed.group}" for each in found)
        self.num_weights += sum(each.numel() for each in matrices)
        self.num_bytes += sum(each.packed.num_bytes for each in found)
        self.model.set_submodule(path, ours)
        self.after(self.num_bytes)

    def _pack(self, part: nn.Module, weight: torch.Tensor) -> _Matrix | None:
        if self.quantization is None:
            assert isinstance(weight, Deferred)
            grid = weight.find_grid(keeps_floats=True)
            # A token has one order of inputs for all experts.
            if grid is None or (grid.order is not None and not isinstance(part, nn.Linear)):
                return None
            return _pack(grid, weight.shape[-1], self.device)
        bits = choose_bits(self.quantization, is_head=part is self.model.get_output_embeddings())
        plain = weight.data.to(self.device).flatten(0, -2)
        grid = _round(plain, bits)
        return None if grid is None else _pack(grid, plain.shape[1], self.device)

    def _build(self, part: nn.Module, matrices: list[_Matrix]) -> nn.Module | None:
        """Return our module, or None if the kernels do not compute what torch computes with the plain weights."""
        weights, restore = _list_matrices(part), [matrix.restore for matrix in matrices]
        dtype, packed = weights[0].dtype, [matrix.packed for matrix in matrices]
        name = f"{packed[0].kind} in groups of {packed[0].group}"
        if not isinstance(part, nn.Linear):
            clamps = find_clamps(part)
            biases = None if clamps is None else [each.flatten().to(self.device) for each in _read_biases(part)]
            experts = GpuExperts(packed[0], packed[1], len(weights[0]), dtype, biases, clamps)
            compare = partial(compare_experts, part, experts, *restore)
            return experts if self._try((type(part), *experts.kind), f"experts of {name}", compare) else None
        bias = None if part.bias is None else part.bias.data.to(self.device)
        linear = GpuLinear(packed[0], bias, dtype)
        compare = partial(compare_linear, linear, *restore)
        return linear if self._try((*linear.kind, packed[0].group), name, compare) else None

    def _try(self, key: tuple[object, ...], name: str, compare: Callable[[], str]) -> bool:
        """Return whether modules of this kind may be replaced. compare: returns what differs."""
        if key not in self.tried:
            try:
                differs = compare()
            except Exception as error:  # a compiler or a driver that does not know the kernels
                checks.raise_if_of_device(error)
                differs = checks.on_one_line(error)
            if differs:
                found = quote(f"{name}: {differs}")
                self.progress(f"event=weights_keep_16_bits found={found} consequence=more_memory_and_slower_answers")
            self.tried[key] = not differs
        return self.tried[key]


def _list_matrices(part: nn.Module) -> Sequence[torch.Tensor]:
    """Return the weights of a linear layer, or of experts: gate and up, and down, (experts, out, in)."""
    if isinstance(part, nn.Linear):
        return [part.weight]
    found = [part.get_parameter(name) for name in ("gate_up_proj", "down_proj")]
    return found if find_clamps(part) is None else [each.transpose(1, 2) for each in found]


def _read_biases(part: nn.Module) -> list[torch.Tensor]:
    found = [part.get_parameter(f"{name}_bias") for name in ("gate_up_proj", "down_proj")]
    return [each.read() if isinstance(each, Deferred) else each.data for each in found]


def _round(weight: torch.Tensor, bits: int) -> Grid | None:
    """Return the grid for weight (rows, in), with the nearest numbers; None if no size of groups divides the inputs."""
    group = find_group(weight.shape[1], bits)
    if group is None:
        return None
    parts = torch.split(weight, _count_rows(weight.shape[1]))
    grid = Grid(bits, torch.cat([choose_grid(rows, bits, group).scales for rows in parts]))
    return replace(grid, numbers=lambda first, count: grid.take(first, count).round(weight[first : first + count]))


def _pack(grid: Grid, columns: int, device: torch.device) -> _Matrix | None:
    """Read the numbers of rows with so many columns; return None if there are no kernels for such numbers."""
    kind = _KINDS.get((grid.bits, grid.is_float))
    if kind is None or (grid.zeros is not None and kind != "int4"):
        return None
    grid = grid.replace(lambda part: part.to(device), grid.numbers)
    if grid.order is not None:
        grid = replace(grid, order=grid.order.to(device))
    scales, starts, factors = _arrange(grid)
    if not has_kernels(kind, columns, scales.shape[1]):
        return None
    assert grid.numbers is not None
    count, step = len(scales), _count_rows(columns)
    numbers = torch.empty((count, columns), dtype=torch.uint8, device=device)
    for first in range(0, count, step):
        numbers[first : first + step] = grid.numbers(first, min(step, count - first))
    packed = pack_weights(kind, numbers, scales, starts, factors, grid.order, grid.middle)
    return _Matrix(replace(grid, numbers=None), numbers, packed)


def _arrange(grid: Grid) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return scales, zeros or minima, and factors, as `pack_weights` takes them."""
    if grid.scales.dtype == torch.float8_e4m3fn:
        assert grid.factors is not None
        return grid.scales.view(torch.uint8), None, _merge(grid.factors)
    if grid.factors is not None:
        return grid.scales, grid.minima, grid.factors
    zeros = None if grid.zeros is None else grid.zeros.to(torch.uint8)
    scales, merged = _merge(grid.scales), None if zeros is None else _merge(zeros)
    return (grid.scales, zeros, None) if merged is not None and scales.shape != merged.shape else (scales, merged, None)


def _merge(part: torch.Tensor) -> torch.Tensor:
    """Return one column if all are equal: `quantized.grids` repeats the scale of a row for each group."""
    return part[:, :1] if torch.equal(part, part[:, :1].expand_as(part)) else part


def _count_rows(columns: int) -> int:
    """Return how many rows are moved or rounded at once. Layouts with words have a multiple of 8 in each."""
    return max(1, _AT_ONCE // (columns * _ROWS)) * _ROWS
