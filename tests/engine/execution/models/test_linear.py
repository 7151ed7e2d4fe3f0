"""Checks the factory of projections: which kernel it chooses, what this computes, and that it returns the plain
weights."""

import pytest
import torch
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.models import linear
from conveyor_engine.execution.models.linear import Linear, LinearSpec, build_linear, linear_kind
from conveyor_engine.execution.models.packed_linear import NativeLinear, OneDnnLinear

BUILT = {"native": NativeLinear, "onednn": OneDnnLinear, "torch": nn.Linear}


def projections(dtype: torch.dtype, bias: bool, sizes: tuple[int, ...] = (50, 30, 30)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(70, size, bias=bias).to(dtype) for size in sizes]


def build(kind: str, parts: list[nn.Linear], monkeypatch: pytest.MonkeyPatch) -> Linear:
    if kind == "native" and (reason := native.why_missing()):
        pytest.skip(f"needs the compiled kernels: {reason}")
    if kind == "onednn" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(linear, "linear_kind", lambda spec: kind)
    with torch.inference_mode():
        return build_linear(parts)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("native", torch.float32),
        ("native", torch.bfloat16),
        ("onednn", torch.bfloat16),
        ("torch", torch.float32),
        ("torch", torch.float16),
    ],
    ids=str,
)
def test_a_merged_projection_gives_all_results_and_the_plain_weights_again(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, bias: bool
) -> None:
    parts = projections(dtype, bias)
    merged = build(kind, parts, monkeypatch)
    assert type(merged) is BUILT[kind]
    assert (merged.in_features, merged.out_features) == (70, 110)
    assert torch.equal(merged.weight, torch.cat([part.weight for part in parts]))
    assert (merged.bias is not None) == bias
    x = torch.randn(1, 5, 70).to(dtype)
    with torch.inference_mode():
        exact = torch.cat([part.double()(x.double()) for part in parts], dim=-1)
        assert (merged(x).double() - exact).abs().max() <= (
            1e-5 if dtype == torch.float32 else 1e-2
        ) * exact.abs().max()


def test_a_linear_layer_on_its_own_stays_where_torchs_kernel_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = projections(torch.float32, True, sizes=(50,))
    assert build("torch", [part], monkeypatch) is part


def test_projections_of_other_inputs_or_with_and_without_bias_are_not_stacked() -> None:
    assert linear.stackable([nn.Linear(4, 3), nn.Linear(4, 5)])
    assert not linear.stackable([nn.Linear(4, 3), nn.Linear(5, 3)])
    assert not linear.stackable([nn.Linear(4, 3), nn.Linear(4, 3, bias=False)])
    assert not linear.stackable([nn.Linear(4, 3), nn.Linear(4, 3).double()])


@pytest.mark.parametrize(
    ("kernels", "dtype", "kind"),
    [
        ("avx512", torch.float32, "native"),
        ("avx512", torch.bfloat16, "native"),
        ("amx", torch.float32, "native"),
        ("amx", torch.bfloat16, "native"),
        ("amx", torch.float16, "torch"),
        ("generic", torch.float32, "torch"),
        ("generic", torch.bfloat16, "onednn"),
        (None, torch.float32, "torch"),
        (None, torch.bfloat16, "onednn"),
    ],
)
def test_the_kernel_follows_from_type_and_machine(
    monkeypatch: pytest.MonkeyPatch, kernels: str | None, dtype: torch.dtype, kind: str
) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 on this CPU")
    monkeypatch.setattr(native, "why_missing", lambda: None if kernels else "no compiler")
    monkeypatch.setattr(native, "isa", lambda: kernels)
    assert linear_kind(LinearSpec("cpu", dtype)) == kind
    assert linear_kind(LinearSpec("cuda", dtype)) == "torch"
