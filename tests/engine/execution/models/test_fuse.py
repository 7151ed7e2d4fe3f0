"""Checks which modules are replaced in tiny random models of many families, and that their results stay the same."""

import copy
import types
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from tests.engine.execution.models.families import FAMILIES, Dense, logits_of, make_model, relative_error
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.models import fuse
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.layers import Attention, DecoderLayer, GatedMlp, RmsNorm
from conveyor_engine.execution.models.native_layers import NativeDecoderLayer
from conveyor_engine.execution.models.packed_linear import PackedLinear

WHOLE = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma3Text", "Phi3")


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the compiled kernels and without them, as on a GPU or without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    elif reason := native.why_missing():
        pytest.skip(f"needs the compiled kernels: {reason}")
    kernels: str = request.param
    return kernels


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_float32_model_gives_the_same_logits(family: str) -> None:
    model = make_model(family)
    expected = logits_of(model)
    fuse_model(model)
    assert relative_error(logits_of(model), expected) < 3e-5, "transformers' own are up to 1e-5 from float64's"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_bfloat16_model_is_no_further_from_float32_than_the_original(family: str) -> None:
    exact = logits_of(make_model(family).bfloat16().float())
    model = make_model(family).bfloat16()
    original_error = relative_error(logits_of(model), exact)
    fuse_model(model)
    assert relative_error(logits_of(model), exact) <= 1.5 * original_error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", WHOLE)
def test_layers_of_the_usual_shape_are_replaced_whole(kernels: str, family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype)
    done = fuse_model(model)
    assert (done["layers"], done["norms"]) == (2, 1)
    expected = NativeDecoderLayer if kernels == "native" and not family.startswith("Gemma") else DecoderLayer
    assert all(type(layer) is expected for layer in model.model.layers)
    assert all(type(layer.before_attention) is RmsNorm for layer in model.model.layers)


def test_whole_layers_and_the_output_layer_hold_all_linear_weights_in_packed_order(kernels: str) -> None:
    model = make_model("Qwen3")
    done = fuse_model(model)
    assert done == {"layers": 2, "norms": 1} | ({"linears": 1} if kernels == "native" else {})
    assert any(type(module) is nn.Linear for module in model.modules()) == (kernels == "torch")


@pytest.mark.parametrize("family", ["Qwen3", "Mixtral"])  # one is replaced as a whole, the other part by part
def test_an_original_is_freed_before_the_next_layer_is_replaced(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a start would need memory for two copies of the weights."""
    model = make_model(family, num_hidden_layers=4)
    originals = [ref(layer.self_attn.q_proj.weight) for layer in model.model.layers]
    alive: list[int] = []

    def note(kind: str, recognise: Callable[..., nn.Module | None]) -> tuple[str, Callable[..., nn.Module | None]]:
        def recognise_and_note(part: nn.Module, calls: object) -> nn.Module | None:
            if type(part).__name__.endswith("Attention" if family == "Mixtral" else "DecoderLayer"):
                alive.append(sum(original() is not None for original in originals))
            return recognise(part, calls)

        return kind, recognise_and_note

    watched = "attentions" if family == "Mixtral" else "layers"
    kinds = [note(*kind) if kind[0] == watched else kind for kind in fuse._KINDS]
    monkeypatch.setattr(fuse, "_KINDS", kinds)
    fuse_model(model)
    assert alive == [4, 3, 2, 1]
    assert not any(original() is not None for original in originals)


def test_a_mixture_of_experts_keeps_its_layer_but_not_its_attention() -> None:
    model = make_model("Mixtral")
    assert "layers" not in fuse_model(model)
    assert type(model.model.layers[0]).__name__ == "MixtralDecoderLayer"
    assert type(model.model.layers[0].self_attn) is Attention


@pytest.mark.parametrize("family", ["Cohere", "Glm", "Olmo2", "Phi", "GPTNeoX"])
def test_other_rotations_and_other_norms_keep_their_attention(family: str) -> None:
    model = make_model(family)
    fuse_model(model)
    assert not any(isinstance(module, DecoderLayer | Attention) for module in model.modules())


def test_the_embedding_stays_when_the_output_layer_shares_its_weights(kernels: str) -> None:
    model = make_model("Llama", tie_word_embeddings=True)
    expected = logits_of(model)
    fuse_model(model)
    assert isinstance(model.get_output_embeddings(), PackedLinear) == (kernels == "native")
    assert relative_error(logits_of(model), expected) < 1e-5


def test_other_models_of_the_class_keep_their_code() -> None:
    model, other = make_model("Qwen3"), make_model("Qwen3")
    expected = logits_of(other)
    fuse_model(model)
    assert torch.equal(logits_of(other), expected)


def _bind(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = types.MethodType(forward, module)


def _scale_mlp(mlp: nn.Module) -> None:
    original = type(mlp).forward
    _bind(mlp, lambda self, x: 1.05 * original(self, x))


def _norm_after(layer: nn.Module) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        hidden_states = hidden_states + self.input_layernorm(self.self_attn(hidden_states, **arguments)[0])
        mlp: torch.Tensor = self.post_attention_layernorm(self.mlp(hidden_states))
        return hidden_states + mlp

    _bind(layer, forward)


def _parallel(layer: nn.Module) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden_states), **arguments)[0]
        out: torch.Tensor = hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))
        return out

    _bind(layer, forward)


def _scale_branches(layer: nn.Module) -> None:
    def forward(self: Any, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        hidden_states = hidden_states + 0.95 * self.self_attn(self.input_layernorm(hidden_states), **arguments)[0]
        mlp: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + 0.95 * mlp

    _bind(layer, forward)


def _scale_small_branches(layer: nn.Module) -> None:
    """Make the branches as small compared to the residual as those of a trained model can be."""
    for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
        linear.weight.data *= 0.01
    _scale_branches(layer)


def _own_weight(layer: nn.Module) -> None:
    layer.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", [_norm_after, _parallel, _scale_branches, _scale_small_branches, _own_weight])
def test_a_layer_that_only_looks_alike_keeps_its_code(change: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    model = make_model("Llama").to(dtype)
    change(model.model.layers[1])
    expected = logits_of(model)
    done = fuse_model(model)
    assert (done["layers"], done["attentions"], done["mlps"]) == (1, 1, 1)
    assert type(model.model.layers[1]).__name__ == "LlamaDecoderLayer"
    if dtype == torch.float32:
        assert relative_error(logits_of(model), expected) < 1e-5


def test_an_mlp_that_computes_something_else_with_the_same_parts_keeps_its_code() -> None:
    model = make_model("Llama")
    first, second = (layer.mlp for layer in model.model.layers)
    _bind(first, lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)))
    _scale_mlp(second)
    expected = logits_of(model)
    assert fuse_model(model)["attentions"] == 2
    assert model.model.layers[0].mlp is first
    assert model.model.layers[1].mlp is second
    assert relative_error(logits_of(model), expected) < 1e-5


def _bend_far_positions(attention: nn.Module) -> None:
    original = type(attention).forward

    def forward(self: Any, hidden_states: torch.Tensor, position_ids: torch.Tensor, **arguments: Any) -> Any:
        out, weights = original(self, hidden_states, position_ids=position_ids, **arguments)
        return torch.where(position_ids[..., None] > 100, 1.1 * out, out), weights

    _bind(attention, forward)


def _clip(attention: nn.Module) -> None:
    original = type(attention).forward

    def forward(self: Any, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        return original(self, hidden_states.clamp(-20, 20), **arguments)

    _bind(attention, forward)


@pytest.mark.parametrize("change", [_clip, _bend_far_positions])
def test_attention_that_differs_only_for_some_input_keeps_its_code(change: Callable[[nn.Module], None]) -> None:
    model = make_model("Qwen3")
    changed = model.model.layers[0].self_attn
    change(changed)
    done = fuse_model(model)
    assert done["layers"] == 1
    assert model.model.layers[0].self_attn is changed


class _Passing(nn.Module):
    """Calls a layer with an additional argument."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        forward = type(layer).forward
        _bind(layer, lambda self, *args, memory, **arguments: forward(self, *args, **arguments))
        self.layer = layer

    def forward(self, *args: Any, **arguments: Any) -> Any:
        return self.layer(*args, memory={}, **arguments)


def test_a_layer_with_an_argument_of_its_own_keeps_its_code() -> None:
    model = make_model("Llama")
    layer = model.model.layers[0]
    model.model.layers[0] = _Passing(layer)
    assert fuse_model(model)["layers"] == 1
    assert model.model.layers[0].layer is layer


def test_a_norm_that_only_looks_alike_keeps_its_code() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps).reciprocal()  # eps is outside the root

    model = make_model("Llama")
    model.odd = OddRMSNorm()
    fuse_model(model)
    assert type(model.odd) is OddRMSNorm


def test_a_linear_layer_with_a_hook_is_left_alone() -> None:
    model = make_model("Llama")
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    fuse_model(model)
    calls.clear()
    logits_of(model)
    assert calls == [1]


def test_an_mlp_with_another_activation_has_one_product_for_gate_and_up_too() -> None:
    model = make_model("Gemma2")
    x = torch.randn(1, 3, 64)
    expected = copy.deepcopy(model.model.layers[0].mlp)(x)
    fuse_model(model)
    mlp = model.model.layers[0].mlp
    assert type(mlp) is GatedMlp
    torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)


def test_a_whole_layer_gets_attention_from_the_step_itself() -> None:
    """None of transformers' attention functions is called, so one native call can compute the whole layer."""
    model = make_model("Mistral")
    fuse_model(model)
    paged = Dense()
    logits_of(model, paged)
    assert [(spec.layer, spec.sliding_window) for spec in paged.specs] == [(0, 5), (1, 5)]
