"""Compares models whose weights are rounded at load with transformers' classes over the same rounded weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.engine.execution.models.families import logits_of, make_model, relative_error
from tests.engine.execution.models.test_formats import prepare, restore
from tests.engine.execution.models.test_quantized import DECLARED, declare
from tests.engine.execution.models.test_quantized import quantize as quantize_files
from tests.engine.lora import save_adapter
from tests.engine.references import Reference, answers
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import native
from conveyor_engine.execution.models.adapt import ModelAdapters
from conveyor_engine.execution.models.adapter_files import Adapter
from conveyor_engine.execution.models.experts import Experts
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.layers import Attention, GatedMlp
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.models.packed_linear import NativeLinear
from conveyor_engine.execution.models.quantize import Quantizer, check_quantization
from conveyor_engine.execution.models.quantized.rounding import choose_grid, quantize
from conveyor_engine.execution.models.recognise import linear_of

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None or native.isa() == "generic", reason="needs the compiled kernels, with vectors"
)

QUANTIZATIONS = pytest.mark.parametrize("quantization", ["int8", "int4"])
NUM_TOKENS = 23  # of `logits_of`


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that most tokens have the same logits.

    Sums are added in another order. So a number of a row may round to its neighbour, which changes its token.
    """
    errors = (actual - expected).abs()[0].amax(dim=1) / expected.abs().max()
    assert errors.quantile(0.7) < 2e-6
    assert errors.max() < 0.02


def rounded(family: str, quantization: Any, **changes: Any) -> tuple[PreTrainedModel, Quantizer]:
    model = make_model(family, initializer_range=0.06, **changes)
    quantizer = Quantizer(model, quantization)
    fuse_model(model, after=quantizer)
    return model, quantizer


def make_reference(ours: PreTrainedModel, family: str, **changes: Any) -> PreTrainedModel:
    """Return transformers' model with the numbers that our weights stand for, and rows rounded as the kernels do."""
    plain = make_model(family, initializer_range=0.06, **changes)
    for path, module in ours.named_modules():
        if isinstance(module, Attention | GatedMlp):
            names = ("q_proj", "k_proj", "v_proj") if isinstance(module, Attention) else ("gate_proj", "up_proj")
            merged = module.qkv_proj if isinstance(module, Attention) else module.gate_up_proj
            _give([plain.get_submodule(f"{path}.{name}") for name in names], merged)
        elif isinstance(module, Experts):
            plain.get_submodule(path).forward = partial(_compute_experts, module)  # type: ignore[method-assign]
        elif isinstance(module, NativeLinear) and path.rpartition(".")[2] in ("o_proj", "down_proj", "lm_head"):
            _give([plain.get_submodule(path)], module)
    return plain


def _give(linears: list[Any], ours: Any) -> None:
    for linear, weight in zip(linears, ours.weight.split([each.out_features for each in linears]), strict=True):
        linear.weight = nn.Parameter(weight)
        linear.register_forward_pre_hook(partial(_round_rows, ours.packed.group))


def _round_rows(group: int, _: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    grouped = inputs[0].unflatten(-1, (-1, group))
    steps = grouped.abs().amax(dim=-1, keepdim=True) / 127
    return ((grouped / steps).nan_to_num().round() * steps).flatten(-2)


def _compute_experts(ours: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for expert in range(len(ours.packed.down)):
        gate_up, down = ours.packed.gate_up[expert], ours.packed.down[expert]
        gate, up = _multiply(x, gate_up).chunk(2, dim=-1)
        share = (shares * (chosen == expert)).sum(dim=-1, keepdim=True)
        total += share * _multiply(nn.functional.silu(gate) * up, down)
    return total


def _multiply(x: torch.Tensor, weight: native.Packed) -> torch.Tensor:
    assert isinstance(weight, native.PackedIntegers)
    return _round_rows(weight.group, nn.Identity(), (x,)) @ native.unpack_integers(weight).t()


@QUANTIZATIONS
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral"])
def test_a_rounded_model_computes_what_transformers_computes_with_the_rounded_weights(
    family: str, quantization: str
) -> None:
    ours, quantizer = rounded(family, quantization)
    assert (quantizer.num_rounded, quantizer.num_kept) == (9, 0)
    assert all(type(layer) is NativeDecoderLayer for layer in ours.model.layers)
    expected, original = logits_of(make_reference(ours, family)), logits_of(make_model(family, initializer_range=0.06))
    assert_same(logits_of(ours), expected)
    error = (expected - original).norm() / original.norm()
    assert 0.005 < error < (0.04 if quantization == "int8" else 0.4)


@QUANTIZATIONS
def test_a_mixture_computes_what_transformers_computes_with_the_rounded_experts(quantization: str) -> None:
    """The router keeps its bits, so each token's experts are those of the original."""
    one_layer = {"num_hidden_layers": 1}  # a second one spreads to all tokens what rounds to a neighbour
    ours, quantizer = rounded("Mixtral", quantization, **one_layer)
    assert (quantizer.num_rounded, quantizer.num_kept) == (2 + 2 * 8 + 1, 0)
    quantizer.check_share()
    expected = logits_of(make_reference(ours, "Mixtral", **one_layer))
    original = logits_of(make_model("Mixtral", initializer_range=0.06, **one_layer))
    assert_same(logits_of(ours), expected)
    error = (expected - original).norm() / original.norm()
    assert 0.005 < error < (0.04 if quantization == "int8" else 0.4)


def test_tied_embeddings_keep_their_type_and_only_the_head_is_rounded() -> None:
    ours, _ = rounded("Llama", "int4", tie_word_embeddings=True)
    head = ours.get_output_embeddings()
    assert isinstance(head, NativeLinear)
    assert isinstance(head.packed, native.PackedIntegers)
    assert head.packed.bits == 8, "logits have no later layer that averages errors"
    original = make_model("Llama", initializer_range=0.06).get_input_embeddings()
    assert torch.equal(ours.get_input_embeddings().weight, original.weight)


def test_layers_that_are_replaced_in_parts_are_rounded_too() -> None:
    ours, quantizer = rounded("Gemma2", "int8")
    assert quantizer.num_rounded == 9
    assert_same(logits_of(ours), logits_of(make_reference(ours, "Gemma2")))


def test_weights_that_no_group_divides_stay_as_they_are() -> None:
    _, quantizer = rounded("Qwen3", "int8", intermediate_size=100)
    assert quantizer.num_kept == 2, "down_proj of two layers"


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_off_by_half_a_step_at_most(bits: int) -> None:
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    packed = quantize(native.pack_linear(weight), bits)
    assert packed is not None
    grid = choose_grid(weight, bits, packed.group)
    plain = native.unpack_integers(packed)
    error, step = (plain - weight).view(70, -1, packed.group).abs(), grid.scales.float().abs()[..., None]
    inside = weight.view(error.shape).abs() <= step * (127 if bits == 8 else 7)
    assert (error <= step * 0.501)[inside].all()
    assert not plain[3].any()
    assert (plain - weight).norm() / weight.norm() < (0.007 if bits == 8 else 0.09)


KEPT = ["ct_int8_channel", "ct_int4_group", "ct_int4_group_zeros", "awq", "gptq_4"]
RESTORED = ["ct_int3_channel", "gptq_3", "gptq_8", "gptq_4_act_order", "ct_fp8_channel", "bnb_int8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*KEPT, *RESTORED])
def test_stored_numbers_are_kept_as_they_are(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    prepare(tmp_path, name)
    ((_, stored),) = restore(tmp_path).tensors.items()
    weight = stored[...]
    ((_, deferred),) = restore(tmp_path, defers=True).tensors.items()
    plain = nn.Linear(*reversed(weight.shape), bias=False, dtype=dtype)
    plain.weight = nn.Parameter(deferred[...].to(dtype), requires_grad=False)
    linear = linear_of(plain)
    assert isinstance(linear, NativeLinear)
    linear.read_stored()
    assert isinstance(linear.packed, native.PackedIntegers) == (name in KEPT)
    if isinstance(linear.packed, native.PackedIntegers):
        assert torch.equal(native.unpack_integers(linear.packed), weight), "scales keep their own type"
    else:
        assert torch.equal(native.unpack_linear(linear.packed), weight.to(dtype))


def test_a_checkpoint_of_8_bits_keeps_them_in_all_layers(tmp_path: Path) -> None:
    model = make_model("Qwen3", initializer_range=0.06)
    model.set_attn_implementation("eager")
    model.save_pretrained(tmp_path)
    change, settings = DECLARED["INT8"]
    quantize_files(tmp_path, change)
    declare(tmp_path, settings)
    loaded = load_model(str(tmp_path), load_config(str(tmp_path)), torch.bfloat16, torch.device("cpu"), defers=True)
    quantizer = Quantizer(loaded, None)
    fuse_model(loaded, after=quantizer)
    linears = [part for part in loaded.modules() if isinstance(part, NativeLinear)]
    kept = [part for part in linears if isinstance(part.packed, native.PackedIntegers)]
    assert quantizer.num_rounded == len(kept) == len(linears) == 9
    plain = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float32, torch.device("cpu"))
    assert torch.equal(native.unpack_integers(kept[-1].packed), plain.get_output_embeddings().weight)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory: Path = tmp_path_factory.mktemp("model")
    return Reference("qwen3", directory, hidden_size=64)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    directory: Path = tmp_path_factory.mktemp("mixture")
    return Reference("qwen3_moe", directory, hidden_size=64)


@QUANTIZATIONS
@pytest.mark.parametrize("model", ["reference", "mixture"])
def test_an_engine_serves_a_rounded_model(model: str, quantization: str, request: pytest.FixtureRequest) -> None:
    """Answers do not depend on the batch, because rows are rounded and multiplied each by itself."""
    reference: Reference = request.getfixturevalue(model)
    whole = answers(reference.make_core(attention_backend="native", quantization=quantization), reference.prompts)
    alone = reference.make_core(attention_backend="native", quantization=quantization, max_num_seqs=1)
    assert answers(alone, reference.prompts) == whole


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT uses it
def test_adapters_are_added_to_rounded_weights(tmp_path: Path) -> None:
    original = make_model("Qwen3", initializer_range=0.06)
    original.set_attn_implementation("eager")
    original.save_pretrained(tmp_path / "model")
    save_adapter(tmp_path / "model", tmp_path / "adapter", 1)
    ours, _ = rounded("Qwen3", "int8")
    expected = [make_reference(ours, "Qwen3") for _ in range(2)]
    PeftModel.from_pretrained(expected[1], tmp_path / "adapter")
    of_model = ModelAdapters(ours, torch.device("cpu"), torch.float32)
    list(of_model.load(1, of_model.fit(Adapter("a", str(tmp_path / "adapter")))))
    for number, reference in enumerate(expected):
        of_model.of_step.begin(torch.full((NUM_TOKENS,), number, dtype=torch.int32), [number] * number)
        assert_same(logits_of(ours), logits_of(reference))
    assert relative_error(logits_of(expected[1]), logits_of(expected[0])) > 0.1


def test_what_cannot_be_rounded_is_refused_by_name(reference: Reference, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`quantization: int8`.*needs the compiled kernels and a CPU with AVX2"):
        reference.make_core(quantization="int8")
    with pytest.raises(ConfigError, match=r"`quantization: int4` needs Triton, and `attention_backend: auto`"):
        check_quantization(reference.make_config(quantization="int4"), torch.device("cuda"), torch.float16, None)
    other_layers = Reference("gpt2", tmp_path / "gpt2", hidden_size=64)
    with pytest.raises(ConfigError, match=r"only 8 % of the weights of GPT2LMHeadModel are in layers that this"):
        other_layers.make_core(attention_backend="native", quantization="int8")
    experts = Reference("gpt_oss", tmp_path / "gpt_oss", hidden_size=64)
    with pytest.raises(ConfigError, match=r"only 25 % of the weights of GptOssForCausalLM are in layers that this"):
        experts.make_core(attention_backend="native", quantization="int8")
