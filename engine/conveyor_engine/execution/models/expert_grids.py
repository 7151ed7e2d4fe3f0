"""Finds the values that a checkpoint's experts of 8 or 4 bits can take, as `quantized.grids` does for linear layers.

Called by `loader`. Checkpoints store the matrices of an expert by themselves, or as GGUF files do, those of all experts
of a layer in one tensor. transformers' classes have gate and up of all experts in one tensor, and down in another.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import Tensor, nn

from conveyor_engine.execution.models.experts import Grids, is_gated
from conveyor_engine.execution.models.quantized.grids import read_grid
from conveyor_engine.execution.models.quantized.reading import Restored, Restoring
from conveyor_engine.execution.models.quantized.rounding import Grid, join_grids

_Found = dict[tuple[int, int], Grid]  # by the number of the expert and that of its matrix
_GATE, _UP, _DOWN = range(3)
_MATRICES: Final = {"gate_proj": _GATE, "w1": _GATE, "up_proj": _UP, "w3": _UP, "down_proj": _DOWN, "w2": _DOWN}
_STACKS: Final = {"gate_up_proj": (_GATE, _UP), "down_proj": (_DOWN,)}
_LAYER: Final = re.compile(r"(.+\.layers\.\d+)\.\w+\.experts")  # transformers may rename the part between
_MATRIX: Final = re.compile(_LAYER.pattern + r"\.(\d+)\.(\w+)\.weight")


def keep_expert_grids(model: nn.Module, restoring: Restoring) -> None:
    """Set `grids` of experts whose weights the kernels can keep as they are stored."""
    experts = {path: part for path, part in model.named_modules() if is_gated(part)}
    by_layer = {match[1]: part for path, part in experts.items() if (match := _LAYER.fullmatch(path))}
    found: dict[nn.Module, _Found] = {part: {} for part in experts.values()}
    for name, weight in restoring.tensors.items():
        match, (path, _, last) = _MATRIX.fullmatch(name), name.rpartition(".")
        if not isinstance(weight, Restored):
            continue
        if match and match[1] in by_layer and match[3] in _MATRICES:
            part, matrix = by_layer[match[1]], _MATRICES[match[3]]
            _, outputs, inputs = part.get_parameter("down_proj").shape
            grid = read_grid(weight, *((outputs, inputs) if matrix == _DOWN else (inputs, outputs)))
            found[part] |= {(int(match[2]), matrix): grid} if grid else {}
        elif path in experts and last in _STACKS and weight.source is None:
            stack = experts[path].get_parameter(last)
            grid = read_grid(weight, len(stack) * stack.shape[1], stack.shape[2])
            found[experts[path]] |= dict(_split(grid, stack, _STACKS[last])) if grid else {}
    for part, of_experts in found.items():
        part.grids = _join(of_experts, len(part.get_parameter("down_proj")))  # type: ignore[assignment]


def _split(grid: Grid, stack: Tensor, matrices: Sequence[int]) -> Iterator[tuple[tuple[int, int], Grid]]:
    """Yield the grids of a stack's matrices, which lie one below the other in each expert."""
    rows = stack.shape[1] // len(matrices)
    for number in range(len(stack) * len(matrices)):
        expert, which = divmod(number, len(matrices))
        yield (expert, matrices[which]), grid.take(number * rows, rows)


def _join(found: Mapping[tuple[int, int], Grid], count: int) -> Grids:
    """Return the grids of gate and up side by side, and of down, for each expert; None if one is missing."""
    gate_up = [join_grids([found.get((expert, _GATE)), found.get((expert, _UP))]) for expert in range(count)]
    down = [found.get((expert, _DOWN)) for expert in range(count)]
    whole = [[grid for grid in grids if grid is not None] for grids in (gate_up, down)]
    return whole[0] if len(whole[0]) == count else None, whole[1] if len(whole[1]) == count else None
