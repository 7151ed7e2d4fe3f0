"""Checks that experts keep the numbers of a checkpoint that stores each expert's matrices by themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.execution.models.test_quantized import declare, quantize, to_int8
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine.execution import native
from conveyor_engine.execution.models.experts import Experts
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantize import Quantizer
from conveyor_engine.execution.models.quantized.grids import read_grid
from conveyor_engine.execution.models.quantized.layouts import (
    restore_mxfp4,
    restore_mxfp4_experts,
    restore_nvfp4,
    restore_scaled,
)
from conveyor_engine.execution.models.quantized.rounding import choose_grid

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels, with vectors"
)


class Unread:
    """A tensor of a checkpoint that must not be read."""

    kind, shape = "F8_E4M3", (32, 64)

    def __getitem__(self, index: Any) -> torch.Tensor:
        raise AssertionError


@pytest.mark.parametrize("restore", [restore_nvfp4, restore_mxfp4, restore_mxfp4_experts, restore_scaled])
def test_kernels_without_floats_read_no_scales_of_floats(restore: Any) -> None:
    parts: Any = {end: Unread() for end in ("", "_packed", "_blocks", "_scales", "_scale", "_scale_2")}
    declared: Any = None
    assert read_grid(parts, declared, restore, False, (32, 64)) is None
    with pytest.raises(AssertionError):
        read_grid(parts, declared, restore, True, (32, 64))


def to_int4(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Store a weight as compressed-tensors' `pack-quantized` does, with groups of 32."""
    grid = choose_grid(weight, 4, 32)
    return {
        f"{layer}.weight_packed": _pack(grid.round(weight).view(len(weight), -1, 8)),
        f"{layer}.weight_scale": grid.scales,
        f"{layer}.weight_shape": torch.tensor(weight.shape),
    }


def to_awq(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    grid = choose_grid(weight, 4, 32)
    in_order = grid.round(weight).t().reshape(weight.shape[1], -1, 8)
    numbers = torch.empty_like(in_order)
    numbers[..., [0, 4, 1, 5, 2, 6, 3, 7]] = in_order
    zeros = torch.full((weight.shape[1] // 32, len(weight) // 8), 0x88888888 - (1 << 32), dtype=torch.int32)
    return {f"{layer}.qweight": _pack(numbers), f"{layer}.qzeros": zeros, f"{layer}.scales": grid.scales.half().t()}


def to_gptq(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    grid = choose_grid(weight, 4, 32)
    numbers = grid.round(weight).view(len(weight), -1, 8)
    zeros = torch.full((weight.shape[1] // 32, len(weight) // 8), 0x77777777, dtype=torch.int32)  # less 1
    return {f"{layer}.qweight": _pack(numbers).t(), f"{layer}.qzeros": zeros, f"{layer}.scales": grid.scales.half().t()}


def _pack(numbers: torch.Tensor) -> torch.Tensor:
    """Put eight numbers of 4 bits into a word. Of its 32 bits, the upper half becomes negative."""
    return (numbers.long() << torch.arange(0, 32, 4)).sum(dim=-1).to(torch.int32)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("change", "method"),
    [(to_int8, "compressed-tensors"), (to_int4, "compressed-tensors"), (to_awq, "awq"), (to_gptq, "gptq")],
)
def test_stored_numbers_of_experts_are_kept_as_they_are(tmp_path: Path, kind: str, change: Any, method: str) -> None:
    """The two families name an expert's matrices differently."""
    save_tiny_model(kind, tmp_path, hidden_size=64)
    quantize(tmp_path, lambda layer, weight: (change if "experts" in layer else keep)(layer, weight))
    declare(tmp_path, {"quant_method": method, "bits": 4, "group_size": 32})
    dtypes = (torch.bfloat16, torch.float32)
    loaded, plain = (
        load_model(str(tmp_path), load_config(str(tmp_path)), each, torch.device("cpu"), defers=each == torch.bfloat16)
        for each in dtypes
    )
    quantizer = Quantizer(loaded, None)
    fuse_model(loaded, after=quantizer)
    assert quantizer.num_rounded == 3 * 4 * 2
    for path, experts in loaded.named_modules():
        if isinstance(experts, Experts):
            original = plain.get_submodule(path)
            for stack, stored in (
                (experts.packed.gate_up, original.gate_up_proj),
                (experts.packed.down, original.down_proj),
            ):
                kept = [native.unpack_integers(stack[number]) for number in range(len(stack))]  # type: ignore[arg-type]
                assert torch.equal(torch.stack(kept), stored)


def test_experts_of_gptq_with_columns_in_any_order_keep_16_bits_and_their_numbers(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def to_ordered(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = (torch.arange(weight.shape[1]) // 32)[torch.randperm(weight.shape[1], generator=generator)]
        return to_gptq(layer, weight) | {f"{layer}.g_idx": groups.int()}

    save_tiny_model("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=64)
    quantize(tmp_path, lambda layer, weight: (to_ordered if "experts" in layer else keep)(layer, weight))
    declare(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    loaded, plain = (
        load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"), defers=defers)
        for defers in (True, False)
    )
    quantizer = Quantizer(loaded, None)
    fuse_model(loaded, after=quantizer)
    assert quantizer.num_rounded == 0
    found = {path: part for path, part in loaded.named_modules() if isinstance(part, Experts)}
    assert found
    for path, experts in found.items():
        for stack, stored in (
            (experts.packed.gate_up, plain.get_submodule(path).gate_up_proj),
            (experts.packed.down, plain.get_submodule(path).down_proj),
        ):
            kept = [native.unpack_linear(stack[number]) for number in range(len(stack))]  # type: ignore[arg-type]
            assert torch.equal(torch.stack(kept), stored)


def keep(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{layer}.weight": weight}
