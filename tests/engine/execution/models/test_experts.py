"""Checks that the compiled kernels' experts replace transformers' where they compute the same, and only there."""

from typing import Any

import pytest
import torch
from tests.engine.tiny_models import make_config, make_model
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.models.experts import Experts, experts_of
from conveyor_engine.execution.native.experts import PackedExperts

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="needs the compiled kernels")
# Families whose experts are two tensors of gated MLPs with SiLU.
KINDS = ("deepseek_v3", "lfm2_moe", "mimo_v2_flash", "mixtral", "qwen3_moe", "qwen3_5_moe_text", "qwen3_next")


def experts_in(kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    model = make_model(kind, make_config(kind, **changes), "eager").to(dtype).requires_grad_(False)
    return [part for part in model.modules() if hasattr(part, "gate_up_proj") and hasattr(part, "down_proj")]


@pytest.mark.parametrize("instructions", ["generic", "avx2", "avx512", "avx512bf16", "amx"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_each_family_are_replaced_where_linear_layers_are(kind: str, instructions: str) -> None:
    """Without vector instructions, torch's own kernels are as good."""
    before = native.isa()
    if not native.use_isa(instructions):
        pytest.skip(f"this CPU or this build has no {instructions}")
    try:
        for dtype in (torch.float32, torch.bfloat16):
            found = [part for part in experts_in(kind, dtype) if isinstance(part.gate_up_proj, nn.Parameter)]
            assert found
            assert all(isinstance(experts_of(part), Experts) == (instructions != "generic") for part in found)
    finally:
        native.use_isa(before)


def test_experts_that_compute_something_else_keep_transformers_code() -> None:
    (clamped, *_) = experts_in("gpt_oss")
    assert experts_of(clamped) is None
    (experts, *_) = experts_in("mixtral")
    assert experts_of(experts) is not None
    forward = type(experts).forward
    experts.forward = lambda *given: forward(experts, *given) * 1.01  # type: ignore[method-assign]
    assert experts_of(experts) is None
    (gelu, *_) = experts_in("mixtral", hidden_act="gelu")
    assert experts_of(gelu) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 700])
def test_tokens_share_experts_in_any_number(dtype: torch.dtype, tokens: int) -> None:
    """700 tokens with 7 experts each exceed what is computed at once, and some experts have more than 256 of them."""
    random = torch.Generator().manual_seed(0)
    gate_up, down = torch.randn(9, 2 * 24, 50, generator=random) * 0.2, torch.randn(9, 50, 24, generator=random) * 0.2
    x = torch.randn(tokens, 50, generator=random)
    chosen = torch.rand(tokens, 10, generator=random).argsort(dim=1)[:, :7]  # number 9 is that of no expert
    shares = torch.rand(tokens, 7, generator=random)
    gate_up, down, x = (each.to(dtype) for each in (gate_up, down, x))
    expected = torch.zeros(tokens, 50)
    for expert in range(9):
        gate, up = (x.float() @ gate_up[expert].float().t()).chunk(2, dim=-1)
        share = (shares * (chosen == expert)).sum(dim=1, keepdim=True)
        expected += share * ((nn.functional.silu(gate) * up) @ down[expert].float().t())
    found = PackedExperts(gate_up, down).run(x, chosen, shares)
    error = (found.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


def test_a_token_s_sum_is_the_same_alone_and_among_others() -> None:
    random = torch.Generator().manual_seed(0)
    experts = PackedExperts(torch.randn(4, 64, 32, generator=random), torch.randn(4, 32, 32, generator=random))
    x = torch.randn(40, 32, generator=random)
    chosen, shares = torch.rand(40, 4, generator=random).argsort(dim=1)[:, :2], torch.rand(40, 2, generator=random)
    whole = experts.run(x, chosen, shares)
    alone = [experts.run(*(each[i : i + 1] for each in (x, chosen, shares))) for i in range(40)]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-5, atol=1e-4)


def test_nothing_is_computed_for_no_tokens() -> None:
    experts = PackedExperts(torch.randn(2, 64, 32), torch.randn(2, 32, 32))
    empty = torch.zeros(0, 2)
    assert experts.run(torch.zeros(0, 32), empty.long(), empty).shape == (0, 32)
