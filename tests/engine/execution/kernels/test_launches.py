"""Counts the kernels that a decoder layer and sampling launch on a GPU. It is simulated by CUDA tensors without
numbers.

Reading a number, which would wait for the GPU, raises an error.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.execution import interpreter  # noqa: F401  before the kernels are imported
from tests.engine.execution.kernels.cuda_layers import (
    PACKED,
    SHAPES,
    STEPS,
    prepare,
    prepare_cuts,
    prepare_experts,
    prepare_sampling,
)
from tests.engine.execution.kernels.cuda_mixers import MIXERS, OF_MIXERS, prepare_mixer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from conveyor_engine.execution.kernels import paged_attention

aten = torch.ops.aten
NO_KERNEL = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default),
    *(aten._unsafe_view.default, torch.ops.prim.device.default),
}
LAYER = ["_rms_norm", "linear", "_prepare_heads", "_attend", "linear", "_rms_norm", "linear", "_silu_mul", "addmm_"]
PLANNED = [*LAYER[:3], "_plan_decodes", *LAYER[3:]]  # the first layer of a step
OF_FEW_ROWS = ["_multiply_rows", "_prepare_heads", "_attend", *["_multiply_rows"] * 3]


class Launches(TorchDispatchMode):
    """The kernels that torch and Triton would launch, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []

        def launch(kernel: Any, *_: Any, **__: Any) -> None:
            self.names.append(kernel.fn.__name__)

        monkeypatch.setattr(type(paged_attention._attend), "run", launch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in NO_KERNEL:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, int], list[str]]:
    def run(shape: str, step: str, num_layers: int) -> list[str]:
        with FakeTensorMode(), torch.inference_mode():
            call = prepare(SHAPES[shape], STEPS[step])
            with Launches(monkeypatch) as launches:
                for _ in range(num_layers):
                    call()
        return launches.names

    return run


@pytest.mark.parametrize("shape", ["Llama-3.2-1B", "Qwen3-8B"])
def test_a_layer_launches_nine_kernels(launched: Callable[[str, str, int], list[str]], shape: str) -> None:
    assert launched(shape, "decodes", 2) == PLANNED + LAYER
    assert launched(shape, "a chunk of a prompt", 1) == LAYER


@pytest.mark.parametrize("shape", ["Llama-3.2-1B", "Qwen3-8B"])
@pytest.mark.parametrize("step", ["one long decode", "four decodes"])
def test_a_layer_of_few_rows_launches_six(
    launched: Callable[[str, str, int], list[str]], shape: str, step: str
) -> None:
    assert launched(shape, step, 2) == [*OF_FEW_ROWS[:2], "_plan_decodes", *OF_FEW_ROWS[2:], *OF_FEW_ROWS]


@pytest.mark.parametrize("name", PACKED)
def test_weights_of_few_bits_add_only_the_sums_of_divided_products(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A whole layer reads no number from the device. A product of many rows restores its weights."""
    packed, launched = PACKED[name], {}
    for step in STEPS:
        with FakeTensorMode(), torch.inference_mode():
            call = prepare(SHAPES["Llama-3.2-1B"], STEPS[step], packed=packed)
            with Launches(monkeypatch) as launches:
                call()
        launched[step] = launches.names
    product = ["_multiply_packed", "_join_parts"]
    between = ["_prepare_heads", "_plan_decodes", "_attend"]
    decodes = ["_rms_norm", *product, *between, *product, "_rms_norm", *product, "_silu_mul", *product]
    without_parts = [kernel for kernel in launched["decodes"] if kernel != "_join_parts"]
    assert without_parts == [kernel for kernel in decodes if kernel != "_join_parts"]
    of_a_row = ["_multiply_packed_row", *between, *["_multiply_packed_row"] * 3]
    assert launched["one long decode"] == of_a_row
    assert {"_restore", "_multiply_packed"} & {*launched["a chunk of a prompt"]} == {"_restore"}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_experts_with_weights_of_few_bits_launch_six(monkeypatch: pytest.MonkeyPatch, name: str, tokens: int) -> None:
    """They read no number from the device. torch's sorting is several kernels."""
    with FakeTensorMode(), torch.inference_mode():
        call = prepare_experts(PACKED[name], tokens)
        with Launches(monkeypatch) as launches:
            out = call()
    activation = "_clamped_glu" if name == "mxfp4" else "_silu_mul"  # gpt-oss has its own
    assert launches.names == ["sort", "_plan_tiles", "_multiply_experts", activation, "_multiply_experts", "sum"]
    assert isinstance(out, torch.Tensor)
    assert (out.shape, out.dtype) == ((tokens, 2048), torch.bfloat16)


LFM2 = ["linear", "_convolve", "linear"]
TO_DELTA, AFTER_DELTA = ["linear", "_convolve"], ["_norm_gated", "linear"]
TO_GROUPED_DELTA = ["linear", "index_select", "index_select", "_convolve"]
TO_SPLIT_DELTA = ["linear", "cat", "_convolve"]
TO_FALCON, AFTER_FALCON = ["mul", "linear", "mul", "_convolve"], ["silu", "mul", "linear"]
MAMBA2 = {
    "decodes": ["linear", "_convolve", "_mamba2_decodes", "_norm_gated", "linear"],
    "a chunk of a prompt": ["linear", "_convolve", "_mamba2_chunks", "_norm_gated", "linear"],
    "both": ["linear", "_convolve", "_mamba2_decodes", "_mamba2_chunks", "_norm_gated", "linear"],
}
LAUNCHES_OF_MIXERS = {
    "Nemotron-H-8B": MAMBA2,
    "Nemotron-H-47B": MAMBA2,
    "Granite-4.0-H": MAMBA2,
    "LFM2-1.2B": {"decodes": LFM2, "a chunk of a prompt": LFM2, "both": LFM2},
    "Qwen3.6-35B": {
        "decodes": [*TO_DELTA, "_delta_decodes", *AFTER_DELTA],
        "a chunk of a prompt": [*TO_DELTA, "_delta_matrices", "_delta_chunks", *AFTER_DELTA],
        "both": [*TO_DELTA, "_delta_decodes", "_delta_matrices", "_delta_chunks", *AFTER_DELTA],
    },
    "Qwen3-Coder-Next": {
        "decodes": [*TO_GROUPED_DELTA, "_delta_decodes", *AFTER_DELTA],
        "a chunk of a prompt": [*TO_GROUPED_DELTA, "_delta_matrices", "_delta_chunks", *AFTER_DELTA],
        "both": [*TO_GROUPED_DELTA, "_delta_decodes", "_delta_matrices", "_delta_chunks", *AFTER_DELTA],
    },
    "OLMo-hybrid-7B": {
        "decodes": [*TO_SPLIT_DELTA, "_delta_decodes", *AFTER_DELTA],
        "a chunk of a prompt": [*TO_SPLIT_DELTA, "_delta_matrices", "_delta_chunks", *AFTER_DELTA],
        "both": [*TO_SPLIT_DELTA, "_delta_decodes", "_delta_matrices", "_delta_chunks", *AFTER_DELTA],
    },
    "Falcon-H1-7B": {
        "decodes": [*TO_FALCON, "_mamba2_decodes", *AFTER_FALCON],
        "a chunk of a prompt": [*TO_FALCON, "_mamba2_chunks", *AFTER_FALCON],
        "both": [*TO_FALCON, "_mamba2_decodes", "_mamba2_chunks", *AFTER_FALCON],
    },
}


@pytest.mark.parametrize("name", MIXERS)
def test_a_layer_with_states_launches_few_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It reads no number from the device."""
    launched = {}
    for step in LAUNCHES_OF_MIXERS[name]:
        with FakeTensorMode(), torch.inference_mode():
            call = prepare_mixer(name, OF_MIXERS[step])
            with Launches(monkeypatch) as launches:
                call()
                first = len(launches.names)
                call()
        launched[step] = launches.names[first:]
        assert first <= len(launched[step]) + 5, "finds the rows once for all layers"
    assert launched == LAUNCHES_OF_MIXERS[name]


def test_further_norms_and_another_activation_are_launches_of_their_own(
    launched: Callable[[str, str, int], list[str]],
) -> None:
    behind_attention = ["linear", "_rms_norm", "_rms_norm", "linear", "gelu", "mul", "linear", "_rms_norm", "add"]
    assert launched("Gemma-2-2B", "decodes", 1) == [*PLANNED[:5], *behind_attention]
    product, behind = "_multiply_rows", ["_rms_norm", "add"]
    of_few = [product, *behind, product, "gelu", "mul", product, *behind]
    assert launched("Gemma-2-2B", "one long decode", 1) == [*OF_FEW_ROWS[:2], "_plan_decodes", "_attend", *of_few]


def test_sampling_launches_two_kernels_whatever_rows_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(), torch.inference_mode():
        call = prepare_sampling(64)
        with Launches(monkeypatch) as launches:
            call()
    assert launches.names == ["_weigh_slices", "_choose"]


def test_cuts_are_one_kernel_and_copy_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode(), torch.inference_mode():
        call = prepare_cuts(64)
        with Launches(monkeypatch) as launches:
            call()
    assert launches.names == ["_cut"]
