"""Tests experts of 4 and 8 bits as GPUs keep them, on a GPU or otherwise in Triton's interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engine import gguf_files
from tests.engine.execution.interpreter import DEVICE, ON_DEVICE
from tests.engine.execution.models.test_expert_grids import keep, to_awq, to_gptq, to_int4
from tests.engine.execution.models.test_experts import experts_in
from tests.engine.execution.models.test_gguf import save
from tests.engine.execution.models.test_quantized import WEIGHTS, declare, quantize, to_int8
from tests.engine.tiny_models import save_tiny_model
from torch import nn

from conveyor_engine.execution.kernels import packed_experts
from conveyor_engine.execution.kernels.packed_product import restore
from conveyor_engine.execution.models import gpu_packing, gpu_trial
from conveyor_engine.execution.models.experts import find_clamps
from conveyor_engine.execution.models.gpu_experts import GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.gpu_packing import pack_model
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantized.deferred import Deferred
from conveyor_engine.execution.models.quantized.numbers import look_up_fp4
from conveyor_engine.gguf.unpack import unpack
from conveyor_engine.preview.gguf_size import count_gguf_bytes

# From the sigmoid of a large negative number, which is correctly 0.
pytestmark = [pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"), *ON_DEVICE]

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 64]}
ROWS = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}


@pytest.fixture(autouse=True)
def no_rows(triton_runs_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", ())


def to_fp8_blocks(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Store a weight as Qwen and DeepSeek do, with a scale for blocks of 32 rows and 64 columns."""
    blocks = weight.unflatten(-1, (-1, 64)).unflatten(-3, (-1, 32))
    scales = blocks.abs().amax(dim=(-1, -3)) / 448
    numbers = weight / scales.repeat_interleave(32, -2).repeat_interleave(64, -1)
    end = "" if layer.endswith("proj") and weight.dim() == 3 else ".weight"
    return {f"{layer}{end}": numbers.to(torch.float8_e4m3fn), f"{layer}{end}_scale_inv": scales}


def to_fp8_rows(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scales = weight.abs().amax(dim=-1, keepdim=True) / 448
    return {f"{layer}.weight": (weight / scales).to(torch.float8_e4m3fn), f"{layer}.weight_scale": scales}


def to_nvfp4(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Store a weight as ModelOpt does."""
    groups = weight.unflatten(-1, (-1, 16))
    largest = groups.abs().amax(dim=-1) / 6
    whole = largest.max() / 448
    scales = (largest / whole).to(torch.float8_e4m3fn)
    values = groups / (scales.float() * whole)[..., None]
    numbers = (values[..., None] - look_up_fp4(torch.arange(16))).abs().argmin(dim=-1).flatten(-2)
    packed = (numbers[..., ::2] | numbers[..., 1::2] << 4).to(torch.uint8)
    return {f"{layer}.weight": packed, f"{layer}.weight_scale": scales, f"{layer}.weight_scale_2": whole}


FORMATS = {
    "NVFP4": (to_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "FP8 blocks": (to_fp8_blocks, FP8),
    "FP8 rows": (to_fp8_rows, {"quant_method": "compressed-tensors", **ROWS}),
    "INT8": (to_int8, {"quant_method": "compressed-tensors"}),
    "INT4": (to_int4, {"quant_method": "compressed-tensors"}),
    "AWQ": (to_awq, {"quant_method": "awq", "bits": 4, "group_size": 32}),
    "GPTQ": (to_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
}


def load_both(folder: Path) -> tuple[Any, Any, list[str]]:
    """Return the packed model, the restored one, and the lines of the log."""
    packed, plain = (
        load_model(str(folder), load_config(str(folder)), torch.float32, torch.device("cpu"), defers=defers)
        for defers in (True, False)
    )
    lines: list[str] = []
    pack_model(packed, None, DEVICE, lines.append)
    return packed, plain.to(DEVICE), lines


def assert_same(packed: Any, plain: Any, lines: list[str]) -> None:
    found = {path: part for path, part in packed.named_modules() if isinstance(part, GpuExperts)}
    assert found, lines
    for path, ours in found.items():
        original = plain.get_submodule(path)
        matrices = [original.gate_up_proj, original.down_proj]
        if find_clamps(original):
            matrices = [each.transpose(1, 2) for each in matrices]
        for kept, weight in zip((ours.gate_up, ours.down), matrices, strict=True):
            torch.testing.assert_close(restore(kept, torch.float32).view_as(weight), weight, rtol=1e-6, atol=0)
        x, shares = torch.randn(9, weight.shape[1], device=DEVICE), torch.rand(9, 2, device=DEVICE)
        chosen = torch.rand(9, 4, device=DEVICE).argsort(dim=1)[:, :2]
        torch.testing.assert_close(ours(x, chosen, shares), original(x, chosen, shares), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        *("NVFP4", "FP8 blocks"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("FP8 rows", "INT4", "INT8", "AWQ", "GPTQ")),
    ],
)
def test_experts_have_the_numbers_of_the_checkpoint_and_compute_with_them(tmp_path: Path, kind: str, name: str) -> None:
    """The two families name an expert's matrices differently."""
    change, settings = FORMATS[name]
    save_tiny_model(kind, tmp_path, hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    quantize(tmp_path, lambda layer, weight: (change if "experts" in layer else keep)(layer, weight))
    declare(tmp_path, settings)
    assert_same(*load_both(tmp_path))


@pytest.mark.parametrize("name", ["FP8 blocks", pytest.param("FP8 rows", marks=pytest.mark.nightly)])
def test_experts_of_fp8_may_be_in_one_tensor(tmp_path: Path, name: str) -> None:
    save_tiny_model("qwen3_5_moe_text", tmp_path, hidden_size=64, moe_intermediate_size=64)
    stored = load_file(tmp_path / WEIGHTS)
    for layer in {path.partition(".experts.")[0] for path in stored if ".experts." in path}:
        gate, up, down = (
            torch.stack([stored.pop(f"{layer}.experts.{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        )
        stored |= to_fp8_blocks(f"{layer}.experts.gate_up_proj", torch.cat((gate, up), dim=1))
        stored |= to_fp8_blocks(f"{layer}.experts.down_proj", down)
    scales = [path for path in stored if path.endswith("_proj_scale_inv")]
    if name == "FP8 rows":
        stored |= {path: stored[path][..., :1].repeat_interleave(32, 1) for path in scales}
    save_file({path: tensor.contiguous() for path, tensor in stored.items()}, tmp_path / WEIGHTS, {"format": "pt"})
    declare(tmp_path, FP8 if name == "FP8 blocks" else FP8 | {"weight_block_size": None})
    assert_same(*load_both(tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_experts_of_a_gguf_file_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Files may have other types for gate and for up."""
    write = gguf_files.write_tensor

    def write_gates(writer: Any, name: str, values: gguf_files.Array, each: str) -> gguf_files.Array:
        return write(writer, name, values, "Q6_K" if each == "Q4_K" and "ffn_gate_exps" in name else each)

    monkeypatch.setattr(gguf_files, "write_tensor", write_gates)
    path, _ = save("qwen3_moe", tmp_path, kind, moe_intermediate_size=256, num_hidden_layers=1)
    packed, plain, lines = load_both(unpack(path))
    assert_same(packed, plain, lines)
    kept = [part.packed for part in packed.modules() if isinstance(part, GpuLinear)]
    kept += [each for part in packed.modules() if isinstance(part, GpuExperts) for each in (part.gate_up, part.down)]
    num_bytes = sum(each.num_bytes for each in kept) + sum(2 * each.numel() for each in packed.parameters())
    assert count_gguf_bytes(unpack(path), keeps_experts=True, on_gpu=True) == num_bytes


def test_a_checkpoint_may_have_fp8_beside_nvfp4_and_no_scales_of_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As published for Qwen3.8: attention in FP8, MLPs in NVFP4. (vLLM 54189: experts of such weights were 0.)"""
    monkeypatch.setattr(gpu_trial, "same", lambda *_: True)
    monkeypatch.setattr(gpu_trial, "compare_experts", lambda *_: "")
    monkeypatch.setattr(gpu_packing, "compare_experts", lambda *_: "")
    save_tiny_model("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=64)
    quantize(tmp_path, lambda layer, weight: _to_fp8_and_nvfp4(layer, weight))
    groups = {
        "group_0": {"weights": {"num_bits": 8, "type": "float"}, "format": "float-quantized"},
        "group_1": {"weights": {"num_bits": 4, "type": "float"}, "format": "nvfp4-pack-quantized"},
    }
    declare(tmp_path, {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups})
    packed, plain, _ = load_both(tmp_path)
    kinds = set[str]()
    for path, part in packed.named_modules():
        if isinstance(part, GpuLinear):
            kinds.add(f"linear {part.packed.kind}")
            weight = plain.get_submodule(path).weight
            torch.testing.assert_close(restore(part.packed, torch.float32), weight, rtol=1e-6, atol=0)
        if isinstance(part, GpuExperts):
            kinds.add(f"experts {part.down.kind}")
            weight = plain.get_submodule(path).down_proj
            torch.testing.assert_close(restore(part.down, torch.float32).view_as(weight), weight, rtol=1e-6, atol=0)
    assert kinds == {"linear fp8", "experts fp4"}


def _to_fp8_and_nvfp4(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if "experts" in layer:
        stored = to_nvfp4(layer, weight)
        whole = 1 / stored.pop(f"{layer}.weight_scale_2").view(1)  # compressed-tensors stores divisors
        return {f"{layer}.weight_packed": stored.pop(f"{layer}.weight"), f"{layer}.weight_global_scale": whole} | stored
    return (to_fp8_rows if "self_attn" in layer else keep)(layer, weight)


@pytest.mark.parametrize("is_gguf", [False, True], ids=["safetensors", "GGUF"])
def test_experts_of_gpt_oss_keep_their_numbers_and_have_biases_and_clamps(tmp_path: Path, is_gguf: bool) -> None:
    if is_gguf:
        path, _ = save("gpt_oss", tmp_path, "MXFP4", num_hidden_layers=1)
        folder = unpack(path)
    else:
        folder = tmp_path
        save_tiny_model("gpt_oss", folder, hidden_size=64, intermediate_size=64)
        to_mxfp4_experts(folder)
    packed, plain, lines = load_both(folder)
    for part in plain.modules():
        if find_clamps(part):
            part.limit = 0.05  # so that it matters
    for part in packed.modules():
        if isinstance(part, GpuExperts):
            part._activate.keywords["limit"] = 0.05  # type: ignore[attr-defined]
            assert all(each is not None and bool(each.any()) != is_gguf for each in part.biases)
            assert 8 * part.down.num_bytes / part.down.numbers.numel() / 2 == 4.5
    assert_same(packed, plain, lines)
    assert any("experts" not in path for path, part in packed.named_modules() if isinstance(part, nn.Linear)) != is_gguf


def to_mxfp4_experts(folder: Path) -> None:
    """Store the experts of gpt-oss as they are published, and let their biases not be 0."""
    stored = load_file(folder / WEIGHTS)
    for name in [name for name in stored if name.endswith("_proj") and ".experts." in name]:
        experts, columns, rows = stored.pop(name).shape
        stored[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(120, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        stored[f"{name}_bias"] = torch.randn(experts, rows) / 8
    save_file(stored, folder / WEIGHTS, {"format": "pt"})
    declare(folder, {"quant_method": "mxfp4"})


def test_experts_are_rounded_as_on_a_cpu(tmp_path: Path) -> None:
    save_tiny_model("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=64)
    model, plain = (
        load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu")) for _ in range(2)
    )
    lines: list[str] = []
    pack_model(model, "int8", DEVICE, lines.append)
    ours, original = (each.model.layers[0].mlp.experts for each in (model, plain))
    assert isinstance(ours, GpuExperts), lines
    weight = restore(ours.down, torch.float32).cpu().view_as(original.down_proj)
    lost = (weight - original.down_proj).norm() / original.down_proj.norm()
    assert 1e-3 < lost < 0.01
    assert lines[-1].endswith("share=1.00 formats=int8/64")


def test_experts_with_sorted_columns_are_not_packed_before_they_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_ordered(layer: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))  # of all experts
        groups = (torch.arange(weight.shape[1]) // 32)[order]
        return to_gptq(layer, weight) | {f"{layer}.g_idx": groups.int()}

    save_tiny_model("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=64)
    quantize(tmp_path, lambda layer, weight: (to_ordered if "experts" in layer else keep)(layer, weight))
    declare(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    grids = list[Any]()
    find_grid = Deferred.find_grid
    monkeypatch.setattr(Deferred, "find_grid", lambda self, **how: (grids.append(find_grid(self, **how)), grids[-1])[1])
    monkeypatch.setattr(gpu_packing, "_pack", lambda *_: pytest.fail("it was packed"))
    packed, _, lines = load_both(tmp_path)
    assert grids
    assert all(grid.order is not None for grid in grids), "otherwise nothing is shown"
    assert not any(isinstance(part, GpuExperts) for part in packed.modules())
    assert not lines


@pytest.mark.parametrize("tokens", [1, 33])
def test_experts_whose_kernels_compute_something_else_keep_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    right = packed_experts.multiply_experts
    many = tokens > 1

    def wrong(x: torch.Tensor, weights: Any, plan: Any, shares: Any = None, bias: Any = None) -> torch.Tensor:
        return right(x, weights, plan, shares, bias) + (plan.has_many == many and shares is not None)

    monkeypatch.setattr(packed_experts, "multiply_experts", wrong)
    save_tiny_model("qwen3_moe", tmp_path, hidden_size=64, moe_intermediate_size=64)
    quantize(tmp_path, lambda layer, weight: (to_int8 if "experts" in layer else keep)(layer, weight))
    declare(tmp_path, {"quant_method": "compressed-tensors"})
    packed, plain, lines = load_both(tmp_path)
    assert lines == [
        f'event=weights_keep_16_bits found="experts of int8 in groups of 64: {tokens} tokens" '
        "consequence=more_memory_and_slower_answers"
    ], "one for all layers"
    for path, part in packed.named_modules():
        if path.endswith("experts"):
            assert torch.equal(part.down_proj, plain.get_submodule(path).down_proj)


@pytest.mark.parametrize("change", ["forward", "gelu", "none"])
def test_experts_with_another_formula_keep_transformers_code(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(gpu_packing, "check_share", lambda *_: None)
    model: Any = nn.Module()
    changes = {"hidden_act": "gelu"} if change == "gelu" else {}
    (model.experts, *_) = experts_in("mixtral", hidden_size=64, intermediate_size=64, **changes)
    model.get_output_embeddings = lambda: None
    if change == "forward":
        forward, part = type(model.experts).forward, model.experts
        part.forward = lambda *given: forward(part, *given) * 1.01
    lines: list[str] = []
    pack_model(model, "int8", DEVICE, lines.append)
    assert isinstance(model.experts, GpuExperts) == (change == "none")
    assert any("experts of int8 in groups of 64: its formula" in line for line in lines) == (change == "forward")
