"""Compares attention over whole sequences by the compiled kernels with plain torch, through `Paged`."""

from itertools import accumulate

import numpy as np
import pytest
import torch

from conveyor_engine.execution import native
from conveyor_engine.execution.attention import packed
from conveyor_engine.execution.attention.backend import AttentionSpec, LayerShape
from conveyor_engine.execution.attention.packed import Packed, PackedNative, choose_packed

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}"
)

CPU = torch.device("cpu")
STARTS = [0, *accumulate((1, 16, 70, 3, 33, 15))]
LAYERS = [LayerShape(4, 2, 16, 16), LayerShape(6, 6, 24, 8), LayerShape(4, 2, 16, 16)]


def tensors(layer: LayerShape, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return query, key and value as slices of one tensor, as merged projections return them."""
    merged = torch.randn((STARTS[-1], 30, 24), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return [
        merged[:, : layer.num_heads, : layer.head_dim],
        merged[:, 10 : 10 + layer.num_kv_heads, : layer.head_dim],
        merged[:, 20 : 20 + layer.num_kv_heads, : layer.value_dim],
    ]


@pytest.mark.parametrize(
    ("causal", "window", "cap", "has_sinks"),
    [
        (False, None, None, False),
        (False, 9, None, False),
        (False, 40, 3.0, True),
        (True, None, None, False),
        (True, 9, None, True),
        (True, None, 3.0, False),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_both_agree_in_layers_of_one_step(
    dtype: torch.dtype, tolerance: float, causal: bool, window: int | None, cap: float | None, has_sinks: bool
) -> None:
    ours, plain = PackedNative(STARTS), Packed(STARTS)
    for index, layer in enumerate(LAYERS):  # the third layer has the shape of the first and reuses its blocks
        sinks = torch.linspace(-1, 2, layer.num_heads).to(dtype) if has_sinks else None
        spec = AttentionSpec(index, 0.4, window, cap, causal, sinks)
        inputs = tensors(layer, dtype, index)
        out = ours.attend(spec, *inputs)
        assert out.is_contiguous()
        assert (out.double() - plain.attend(spec, *inputs).double()).abs().max() < tolerance


@pytest.mark.parametrize("window", [None, 40])
def test_only_a_sequence_with_hidden_tokens_needs_a_mask(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    lengths = np.diff(STARTS)
    keys = np.where(lengths == 33, 20, lengths)
    ends, spec = np.repeat(keys, lengths).astype(np.int32), AttentionSpec(0, 0.4, window, None, causal=False)
    inputs = tensors(LAYERS[0], torch.float32, 0)
    expected = PackedNative(STARTS, ends).attend(spec, *inputs)
    masked, attend_one = [], packed.attend_one
    monkeypatch.setattr(packed, "attend_one", lambda *args: (masked.append(len(args) > 4), attend_one(*args))[1])
    assert (Packed(STARTS, ends).attend(spec, *inputs) - expected).abs().max() < 1e-5
    assert masked.count(True) == 1
    assert (Packed(STARTS).attend(spec, *inputs) - expected).abs().max() > 1e-2, "the check can fail"


def test_it_is_chosen_on_a_cpu_unless_torch_is_configured() -> None:
    assert choose_packed("auto", CPU, torch.bfloat16) is PackedNative
    assert choose_packed("torch", CPU, torch.bfloat16) is Packed
    assert choose_packed("auto", CPU, torch.float16) is Packed
    assert choose_packed("auto", torch.device("cuda"), torch.bfloat16) is Packed
