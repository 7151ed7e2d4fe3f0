"""Tests weights of 4 and 8 bits as GPUs keep them, on a GPU or otherwise in Triton's interpreter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from tests.engine.execution.interpreter import DEVICE, ON_DEVICE
from tests.engine.execution.models.deferred_layers import defer, pack
from tests.engine.execution.models.families import logits_of, make_model, relative_error
from tests.engine.execution.models.test_expert_grids import keep, to_awq
from tests.engine.execution.models.test_formats import prepare, restore
from tests.engine.execution.models.test_gguf import save
from tests.engine.execution.models.test_quantized import DECLARED, declare, quantize
from tests.engine.gguf_files import BLOCK, random_blocks
from tests.engine.references import Reference, add, run, tokens_of
from tests.engine.seeing_models import FAMILIES, save_seeing_model
from torch import nn

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.attention.backend import LastLayer, LayerShape
from conveyor_engine.execution.attention.interface import PagedStep
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels import packed_product
from conveyor_engine.execution.kernels.weights import Weights
from conveyor_engine.execution.models import gpu_trial
from conveyor_engine.execution.models.adapters import AdaptedLinear, Adapters
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.gpu_packing import pack_model
from conveyor_engine.execution.models.last_layer import lay_in_block
from conveyor_engine.execution.models.linear import build_linear, stackable
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.quantized.deferred import Deferred, loading
from conveyor_engine.execution.models.quantized.gguf_blocks import read_blocks
from conveyor_engine.execution.models.quantized.rounding import Grid, choose_grid
from conveyor_engine.execution.models.triton_layers import TritonDecoderLayer
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.gguf.header import KINDS, TensorPlace
from conveyor_engine.gguf.unpack import unpack
from conveyor_engine.tasks.generate.execution import runner

# From the sigmoid of a large negative number, which is correctly 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.usefixtures("few_rows"),
    *ON_DEVICE,
]


def load_weight(folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    """Return a checkpoint's restored weight, and a model of one layer that has it in the checkpoint's files."""
    (stored,) = restore(folder).tensors.values()
    (deferred,) = restore(folder, defers=True).tensors.values()
    weight = stored[...]
    model: Any = nn.Module()
    model.model = nn.Module()
    model.model.proj = nn.Linear(*reversed(weight.shape), bias=False)
    with loading():
        model.model.proj.weight = nn.Parameter(deferred[...].to(dtype), requires_grad=False)
    return weight, model


KEPT = [
    *("ct_int8_channel", "ct_int4_group", "ct_int4_group_zeros", "awq", "gptq_4", "ct_fp8_channel"),
    *("ct_nvfp4", "ct_mxfp4", "gptq_4_act_order"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", KEPT)
def test_stored_numbers_are_kept_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    prepare(tmp_path, name)
    weight, model = load_weight(tmp_path, dtype)
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1, 2) if dtype == torch.float32 else ())
    monkeypatch.setattr(gpu_trial, "same", gpu_trial.same if dtype == torch.float32 else lambda *_: True)
    lines = pack(model)
    ours = model.model.proj
    assert isinstance(ours, GpuLinear), lines
    bits = 8.0 * ours.packed.numbers.nbytes / weight.numel()
    assert bits == (4 if "4" in name or name == "awq" else 8)
    if name == "ct_nvfp4":
        assert 8.0 * ours.packed.num_bytes / weight.numel() == 4.5 + 32 / weight.shape[1], "one more scale for a row"
    assert lines == [
        f"event=weights_rounded linears=1 kept=0 mib={ours.packed.num_bytes / 2**20:.0f} share=1.00 "
        f"formats={ours.packed.kind}/{ours.packed.group}"
    ]
    ours.dtype = torch.float32
    torch.testing.assert_close(ours.weight.cpu(), weight, rtol=1e-6, atol=0)


def test_numbers_of_a_gguf_file_are_kept_in_the_order_of_transformers(tmp_path: Path) -> None:
    """llama.cpp stores the rows of queries and keys in another order."""
    path, written = save("llama", tmp_path, "Q4_0")
    directory = str(unpack(path))
    model = load_model(directory, load_config(directory), torch.float32, torch.device("cpu"), defers=True)
    num_linears = sum(type(part) is nn.Linear for part in written.modules())
    assert pack(model)[-1].startswith(f"event=weights_rounded linears={num_linears} kept=0 ")


BITS_OF_BLOCKS = {"Q4_K": 4.625, "Q5_K": 8.625, "Q6_K": 8.5625, "Q5_0": 8.5, "Q4_0": 4.5, "Q8_0": 8.5}


def write_blocks(folder: Path, kind: str, rows: int) -> tuple[torch.Tensor, Grid]:
    """Write random blocks for a weight of 512 inputs. Return what gguf's package restores, and the grid of the file."""
    number_type = next(each for each in KINDS.values() if each.name == kind)
    if kind in BLOCK:
        stored = random_blocks(np.zeros((rows, 512), dtype=np.float32), kind)
    else:
        values = np.random.default_rng(0).standard_normal((rows, 512), dtype=np.float32)
        stored = quants.quantize(values, GGMLQuantizationType[kind])
    (folder / kind).write_bytes(stored.tobytes())
    grid = read_blocks(TensorPlace(folder / kind, number_type, (rows, 512), 0, stored.size), keeps_floats=True)
    assert grid is not None
    return torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType[kind]).copy()), grid


@pytest.mark.parametrize(
    "kind", ["Q4_K", "Q6_K", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("Q5_K", "Q5_0", "Q4_0", "Q8_0"))]
)
def test_blocks_of_gguf_files_are_kept_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The trial compares products with those of the restored weights."""
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1, 2))
    weight, grid = write_blocks(tmp_path, kind, 24)
    model: Any = nn.Module()
    model.proj = nn.Linear(512, 24, bias=False)
    assert grid.numbers is not None
    defer(model.proj, grid, grid.read_all())
    lines = pack(model)
    assert isinstance(model.proj, GpuLinear), lines
    assert 8.0 * model.proj.packed.num_bytes / weight.numel() == BITS_OF_BLOCKS[kind]
    torch.testing.assert_close(model.proj.weight.cpu(), weight, rtol=2e-6, atol=1e-7)


def test_a_trial_reaches_the_form_of_joined_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = packed_product.multiply

    def wrong(x: torch.Tensor, weights: Weights, *others: Any) -> torch.Tensor:
        return multiply(x, weights, *others) + (weights.kind == "int8")

    monkeypatch.setattr(packed_product, "multiply", wrong)
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (2,))
    _, grid = write_blocks(tmp_path, "Q4_K", 8)
    model: Any = nn.Module()
    model.proj = nn.Linear(512, 8, bias=False)
    defer(model.proj, grid, grid.read_all())
    assert pack(model)[0].startswith('event=weights_keep_16_bits found="int4 in groups of 32: 2 rows" ')


def test_layers_with_blocks_are_joined_though_their_types_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As queries and values of Q4_K_M are."""
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", ())
    model: Any = nn.Module()
    for kind in ("Q4_K", "Q6_K", "Q5_0"):
        _, grid = write_blocks(tmp_path, kind, 16)
        linear = nn.Linear(512, 16, bias=False)
        defer(linear, grid, grid.read_all())
        model.add_module(kind, linear)
    pack(model)
    assert not stackable([model.Q4_K, model.Q5_0])
    joined = build_linear([model.Q4_K, model.Q6_K])
    expected = torch.cat([model.Q4_K.weight, model.Q6_K.weight])
    torch.testing.assert_close(joined.weight, expected, rtol=1e-5, atol=1e-6)
    x = torch.randn(2, 512, device=DEVICE)
    torch.testing.assert_close(joined(x), x @ expected.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["ct_int3_channel", "bnb_int8"])
def test_other_numbers_keep_16_bits(tmp_path: Path, name: str) -> None:
    prepare(tmp_path, name)
    weight, model = load_weight(tmp_path, torch.float32)
    assert pack(model) == []
    assert type(model.model.proj) is nn.Linear
    assert torch.equal(model.model.proj.weight.cpu(), weight)


def test_blocks_of_fp8_have_a_scale_for_128_rows_and_columns() -> None:
    torch.manual_seed(0)
    numbers, scales = torch.randn(200, 256).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    wide = scales.repeat_interleave(128, 0)[:200]
    model: Any = nn.Module()
    model.proj = nn.Linear(256, 200, bias=False)
    weight = defer(model.proj, Grid(8, wide.contiguous(), is_float=True), numbers.view(torch.uint8))
    assert torch.equal(weight, numbers.float() * wide.repeat_interleave(128, 1))
    pack(model)
    assert (model.proj.packed.kind, model.proj.packed.group) == ("fp8", 128)
    torch.testing.assert_close(model.proj.weight.cpu(), weight, rtol=1e-6, atol=0)


def test_equal_scales_of_blocks_do_not_keep_layers_of_fp8_apart() -> None:
    model: Any = nn.Module()
    for name, scales in (("queries", torch.tensor([[1.0, 2.0]])), ("keys", torch.ones(1, 2))):
        linear = nn.Linear(256, 48, bias=False)
        numbers = torch.randn(48, 256).to(torch.float8_e4m3fn).view(torch.uint8)
        defer(linear, Grid(8, scales.repeat(48, 1), is_float=True), numbers)
        model.add_module(name, linear)
    pack(model)
    assert [len(each.packed.scales) for each in (model.queries, model.keys)] == [2, 1]
    assert stackable([model.queries, model.keys])
    joined = build_linear([model.queries, model.keys])
    assert torch.equal(joined.weight, torch.cat([model.queries.weight, model.keys.weight]))


def test_layers_of_one_input_are_joined_if_their_numbers_have_one_kind() -> None:
    model: Any = nn.Module()
    kinds = {"queries": (4, 32), "keys": (4, 32), "values": (8, 32), "others": (4, 64), "rows": (4, 128)}
    for name, (bits, group) in kinds.items():
        linear = nn.Linear(128, 48)
        defer(linear, choose_grid(linear.weight.data, bits, group))
        model.add_module(name, linear)
    pack(model)
    joined = build_linear([model.queries, model.keys])
    assert torch.equal(joined.weight, torch.cat([model.queries.weight, model.keys.weight]))
    x = torch.randn(1, 2, 128, device=DEVICE)
    torch.testing.assert_close(joined(x), torch.cat([model.queries(x), model.keys(x)], dim=-1), rtol=1e-5, atol=1e-6)
    for other in (model.values, model.others, nn.Linear(128, 48)):
        assert not stackable([model.queries, model.rows, other])
    joined = build_linear([model.queries, model.rows])
    assert torch.equal(joined.weight, torch.cat([model.queries.weight, model.rows.weight])), "one scale for a row"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quantization"), [("Qwen3", "int4"), ("Gemma2", "int4"), ("Llama", "int8")])
def test_a_model_computes_the_same_with_joined_layers(family: str, quantization: str) -> None:
    model = make_model(family, intermediate_size=128)
    (line,) = pack(model, quantization)
    assert line.startswith("event=weights_rounded linears=15 kept=0 "), "seven of each layer, and the head"
    rounded = make_model(family, intermediate_size=128)
    for path, part in model.named_modules():
        if isinstance(part, GpuLinear):
            plain = rounded.get_submodule(path)
            lost = (part.weight.cpu() - plain.weight.data).norm() / plain.weight.data.norm()
            assert 1e-3 < lost < (0.01 if quantization == "int8" else 0.15)
            plain.weight = nn.Parameter(part.weight.cpu())
    expected = logits_of(rounded)
    assert relative_error(logits_of(model), expected) < 1e-5
    assert fuse_model(model)["layers"] == 2
    assert all(type(layer) is TritonDecoderLayer for layer in model.model.layers)
    assert sum(isinstance(part, GpuLinear) for part in model.modules()) == 9
    assert relative_error(logits_of(model), expected) < 1e-5


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("change", "settings"),
    [(lambda layer, weight: (to_awq if "layers" in layer else keep)(layer, weight), AWQ), DECLARED["FP8"]],
    ids=["AWQ", "FP8"],
)
def test_a_start_packs_what_a_checkpoint_has_in_few_bits(tmp_path: Path, change: Any, settings: Any) -> None:
    reference = Reference("qwen3", tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    quantize(tmp_path, change)
    declare(tmp_path, settings)
    expected: Any = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))
    model, lines = load_as_product(reference.make_config(attention_backend="auto", device=DEVICE.type))
    linears = [part for part in model.model.modules() if isinstance(part, nn.Linear | GpuLinear)]
    assert len(linears) == 7
    assert all(isinstance(part, GpuLinear) for part in linears), lines
    assert isinstance(model.lm_head, GpuLinear) == (settings is not AWQ)
    for path, part in model.named_modules():
        if isinstance(part, GpuLinear):
            weight = expected.get_submodule(path).weight
            torch.testing.assert_close(part.weight.cpu(), weight, rtol=1e-6, atol=0)
    assert [name for name, each in model.named_parameters() if isinstance(each, Deferred)] == []


def test_encoders_of_images_keep_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES["llava"].config["text_config"], "hidden_size", 64)
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", ())
    save_seeing_model("llava", tmp_path)
    config = EngineConfig(model=str(tmp_path), device=DEVICE.type, dtype="float32", quantization="int8")
    model, _ = load_as_product(config)
    packed = [path for path, part in model.named_modules() if isinstance(part, GpuLinear)]
    assert packed
    assert [path for path in packed if "vision" in path] == []
    assert any("vision" in path for path, part in model.named_modules() if type(part) is nn.Linear)


def load_as_product(config: EngineConfig) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return RunnerStart(config, open_placement(config), lines.append).load(), lines


def test_adapters_are_added_to_packed_weights() -> None:
    torch.manual_seed(0)
    model: Any = nn.Module()
    model.proj = nn.Linear(64, 48, bias=True)
    plain = nn.Linear(64, 48)
    plain.bias = model.proj.bias
    plain.weight = nn.Parameter(defer(model.proj, choose_grid(model.proj.weight.data, 4, 32)), requires_grad=False)
    pack(model)
    adapters = Adapters(DEVICE)
    adapters.grow(32)
    adapters.take(1, slice(0, 4))
    pair = []
    for part in (model.proj, plain.to(DEVICE)):
        adapted = AdaptedLinear(part, adapters, [slice(0, 48)], 32, (DEVICE, torch.float32))
        adapted._down[0, :4], adapted._ups[0][:4] = 0.5, 0.25
        adapters.begin(torch.tensor([0, 1, 0], dtype=torch.int32, device=DEVICE), [1])
        with torch.inference_mode():
            pair.append(adapted(torch.ones(1, 3, 64, device=DEVICE)))
    torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)
    assert (pair[0][0, 1] - pair[0][0, 0]).abs().min() > 1


def test_each_variant_of_the_kernels_is_warmed_up() -> None:
    model: Any = nn.Module()
    model.proj = nn.Linear(64, 48)
    runner_like: Any = SimpleNamespace(model=model, device=DEVICE)
    warmed_up: Any = runner.GenerateRunner.extra_warmup_tokens.fget
    assert warmed_up(runner_like) == (1, 2, 4)
    defer(model.proj, choose_grid(model.proj.weight.data, 4, 32))
    pack(model)
    assert warmed_up(runner_like) == (1, 2, 4, 16, 32, 64, 256)


@pytest.mark.parametrize("quantization", [None, pytest.param("int4", marks=pytest.mark.nightly)])
def test_a_few_tokens_of_which_none_is_sampled_pass_the_last_layer(quantization: Any) -> None:
    model = make_model("Qwen3", intermediate_size=128, num_hidden_layers=1)
    if quantization:
        pack(model, quantization)
    model.to(DEVICE)
    fuse_model(model)
    backend = TorchPaged()
    backend.allocate([LayerShape(4, 2, 16, 16)], 1, 8, torch.float32, DEVICE)
    (layer,) = model.model.layers
    assert layer._multiplies_rows
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for tokens in (1, 3):
        metadata = lay_in_block([0, tokens], [tokens], torch.arange(tokens, device=DEVICE))
        last = LastLayer(0, none, lay_in_block([0], [], none))
        hidden = torch.randn(1, tokens, model.config.hidden_size, device=DEVICE)
        rotation = model.model.rotary_emb(hidden, metadata.slot_mapping[None])
        with torch.inference_mode():
            assert layer(hidden, rotation, PagedStep(backend, metadata, last)).shape == (1, 0, hidden.shape[2])


@pytest.mark.nightly
def test_an_engine_serves_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of transformers with the same rounded weights."""
    monkeypatch.setattr(runner, "select_backend", lambda *_: TritonPaged(num_processors=16))
    reference = Reference("qwen3", tmp_path, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    core = reference.make_core(attention_backend="auto", device=DEVICE.type, quantization="int8")
    prompt = reference.prompts[0][:6]
    add(core, "0", prompt, max_tokens=2)
    rounded: Any = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))
    pack_model(rounded, "int8", torch.device("cpu"), lambda _: None)
    rounded.set_attn_implementation("eager")
    expected = rounded.generate(torch.tensor([prompt]), max_new_tokens=2, do_sample=False)
    assert tokens_of(run(core)["0"]) == expected[0, len(prompt) :].tolist()
    assert any(isinstance(part, GpuLinear) for part in core.executor.model.modules())
