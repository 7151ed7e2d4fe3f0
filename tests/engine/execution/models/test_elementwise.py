"""Checks that torch's operations, which replace missing compiled kernels, compute the same formulas."""

import pytest
import torch

from conveyor_engine.execution import native
from conveyor_engine.execution.models.elementwise import TorchElementwise, choose_elementwise

KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    assert actual.shape == exact.shape
    assert (actual.double() - exact).abs().max() <= TOLERANCE[actual.dtype] * exact.abs().max()


@KINDS
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_its_definition(dtype: torch.dtype, offset: float) -> None:
    x, weight = torch.randn(7, 3, 24).to(dtype), torch.randn(24).to(dtype)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight.double() + offset)
    assert_close(TorchElementwise().rms_norm(x, weight, 1e-5, offset), exact)


@KINDS
@pytest.mark.parametrize("rotary", [16, 8])
def test_rope_rotates_the_first_dimensions_and_copies_the_rest(dtype: torch.dtype, rotary: int) -> None:
    x, cos, sin = (
        torch.randn(5, 3, 16).to(dtype),
        torch.randn(1, 5, rotary).to(dtype),
        torch.randn(1, 5, rotary).to(dtype),
    )
    rotated, rest = x.double()[..., :rotary], x.double()[..., rotary:]
    first, second = rotated.chunk(2, dim=-1)
    exact = rotated * cos[0, :, None].double() + torch.cat([-second, first], -1) * sin[0, :, None].double()
    assert_close(TorchElementwise().rope(x, cos, sin), torch.cat([exact, rest], -1))


@KINDS
def test_silu_mul_is_its_definition(dtype: torch.dtype) -> None:
    x = torch.randn(1, 7, 34).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(TorchElementwise().silu_mul(x), gate * gate.sigmoid() * up)


def test_the_compiled_kernels_are_for_cpus_and_types_that_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_missing", lambda: None)
    assert choose_elementwise(torch.device("cpu"), torch.float32) is native
    assert isinstance(choose_elementwise(torch.device("cpu"), torch.float16), TorchElementwise)
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler")
    assert isinstance(choose_elementwise(torch.device("cpu"), torch.float32), TorchElementwise)
