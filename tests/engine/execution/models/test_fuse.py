"""Fused modules against transformers' own, on tiny random models of many families."""

import types
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from conveyor_engine.execution import native
from conveyor_engine.execution.models import packed_linear
from conveyor_engine.execution.models.fuse import fuse_model
from conveyor_engine.execution.models.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}"
)

_SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {"num_key_value_heads": 2}
_HEADS = _GQA | {"head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": _HEADS | {"attention_bias": True},
    "Qwen2": _GQA,
    "Qwen3": _HEADS,
    "Mistral": _HEADS | {"sliding_window": 5},
    "Gemma2": _HEADS | {"sliding_window": 5},
    "Gemma3Text": _HEADS | {"sliding_window": 5},
    "GPTNeoX": {},
    "Phi": _GQA,
    "Phi3": _GQA,
    "Olmo2": _GQA,
    "Granite": _GQA,
    "Cohere": _GQA,  # rotates neighbours: keeps its own
    "Glm": _HEADS,
    "Mixtral": _HEADS,
}


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(_SMALL | FAMILIES[family] | changes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of ones (or zeros) would hide a wrong formula
            nn.init.normal_(parameter, 1.0, 0.3)
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    tokens = torch.randint(3, 300, (1, 23), generator=torch.Generator().manual_seed(1))
    logits: torch.Tensor = model(tokens, use_cache=False).logits
    return logits.double()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_float32_model_gives_the_same_logits(family: str) -> None:
    model = make_model(family)
    expected = logits_of(model)
    done = fuse_model(model)
    assert done["linears"] >= 1
    assert relative_error(logits_of(model), expected) < 1e-5


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text"])
def test_a_fused_bfloat16_model_is_no_further_from_float32_than_the_original(family: str) -> None:
    exact = logits_of(make_model(family).bfloat16().float())
    model = make_model(family).bfloat16()
    original_error = relative_error(logits_of(model), exact)
    fuse_model(model)
    assert relative_error(logits_of(model), exact) <= 1.5 * original_error


def test_every_part_of_a_qwen3_layer_is_fused() -> None:
    model = make_model("Qwen3")
    assert fuse_model(model) == {"norms": 4 * 2 + 1, "ropes": 2, "mlps": 2, "qkvs": 2, "linears": 2 + 1}
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_the_embedding_stays_when_the_output_layer_shares_its_weights() -> None:
    model = make_model("Llama", tie_word_embeddings=True)
    expected = logits_of(model)
    fuse_model(model)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert relative_error(logits_of(model), expected) < 1e-5


def test_other_models_of_the_class_keep_their_code() -> None:
    model, other = make_model("Qwen3"), make_model("Qwen3")
    expected = logits_of(other)
    fuse_model(model)
    assert torch.equal(logits_of(other), expected)
    assert "forward" not in vars(other.model.layers[0].self_attn)


def test_a_norm_that_only_looks_alike_keeps_its_code() -> None:
    class OddRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps).reciprocal()  # eps outside the root

    model = make_model("Llama")
    model.odd = OddRMSNorm()
    fuse_model(model)
    assert type(model.odd) is OddRMSNorm


def test_an_mlp_that_computes_something_else_with_the_same_parts_keeps_its_code() -> None:
    model = make_model("Llama")
    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(
        lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)), mlp
    )
    expected = logits_of(model)
    assert fuse_model(model)["mlps"] == 1
    assert relative_error(logits_of(model), expected) < 1e-5


def test_a_linear_layer_with_a_hook_is_left_alone() -> None:
    model = make_model("Llama")
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    fuse_model(model)
    logits_of(model)
    assert calls == [1]


def test_merged_projections_serve_each_input_on_its_own_and_keep_nothing() -> None:
    model = make_model("Llama")
    attention = model.model.layers[0].self_attn
    weights = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
    first, second = torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    expected = [weights[0](first), weights[1](second), weights[2](second), weights[2](first)]
    fuse_model(model)
    q, k, v = (getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj"))
    for actual, exact in zip([q(first), k(second), v(second), v(first)], expected, strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-5, atol=1e-5)
    q(first), k(first)
    assert q._shared._input is None


def test_where_onednn_is_the_better_kernel_its_layout_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(native, "has_amx_bf16", lambda: True)
    assert packed_linear.linear_kind(torch.bfloat16) == "onednn"
    linear = nn.Linear(70, 50).bfloat16()
    x = torch.randn(1, 5, 70).bfloat16()
    with torch.inference_mode():
        assert relative_error(PackedLinear([linear])(x).double(), linear.double()(x.double())) < 1e-2
