"""Checks that a step reads nothing from the device, so that a CUDA graph can contain it.

transformers' own modules run with our attention on CUDA tensors without numbers. Reading a number raises an error.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.execution import interpreter  # noqa: F401  before the kernels are imported
from tests.engine.tiny_models import KINDS, OTHER_KINDS, REJECTED, WITH_STATES, make_config, make_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import Quantization
from conveyor_engine.execution import native
from conveyor_engine.execution.attention import interface
from conveyor_engine.execution.attention.interface import Paged
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.graphs import decodes, mixed
from conveyor_engine.execution.graphs.cuda import Work
from conveyor_engine.execution.graphs.step_graphs import StepGraphs
from conveyor_engine.execution.kernels import paged_attention
from conveyor_engine.execution.kernels.weights import Weights
from conveyor_engine.execution.models import gpu_packing, gpu_trial, state_mixers
from conveyor_engine.execution.models.gpu_experts import GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.gpu_packing import pack_model
from conveyor_engine.execution.models.latent import keep_latents
from conveyor_engine.execution.models.mixers import MixerForward, carry_states
from conveyor_engine.execution.models.probe import probe_layers
from conveyor_engine.execution.rows import Rows
from conveyor_engine.execution.states import States

CUDA = torch.device("cuda")
EXPERTS = {
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "gpt_oss",
    "mimo_v2_flash",
    "mixtral",
    "qwen3_moe",
}  # transformers asks the driver how to multiply experts


LAUNCHED_BY = {
    "lfm2": {"_convolve"},
    "nemotron_h": {"_convolve", "_mamba2_decodes", "_mamba2_chunks", "_norm_gated"},
    "qwen3_5_text": {"_convolve", "_delta_decodes", "_delta_matrices", "_delta_chunks", "_norm_gated"},
}


def run_before(work: Work) -> Work:
    work()
    return work


def move(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Move the model to the fake GPU, without its numbers."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
                    moved = moved.to(dtype) if moved.is_floating_point() else moved
                    tensors[name] = moved if tensors is module._buffers else torch.nn.Parameter(moved, False)
        if isinstance(module, GpuLinear):
            module.packed = move_packed(module.packed)
        if isinstance(module, GpuExperts):
            module.gate_up, module.down = move_packed(module.gate_up), move_packed(module.down)


def replace_mixers(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put our mixers in the place of transformers', without comparing their numbers."""
    monkeypatch.setattr(state_mixers, "_compute_same", lambda *_: True)
    for path, part in list(model.named_modules()):
        if isinstance(part.forward, MixerForward):
            ours = state_mixers.mixer_of(part)
            assert ours is not None
            model.set_submodule(path, ours)


def move_packed(packed: Weights) -> Weights:
    both = packed.numbers, packed.scales
    numbers, scales = (torch.empty(each.shape, dtype=each.dtype, device=CUDA) for each in both)
    return replace(packed, numbers=numbers, scales=scales)


def capture_steps(
    model: PreTrainedModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> tuple[StepGraphs, list[str], set[str]]:
    """Return the graphs of a model on the fake GPU, lines of failures, and the kernels that were launched."""
    monkeypatch.setattr(native, "why_missing", lambda: "not on a GPU")
    keep_latents(model.requires_grad_(False))
    carry_states(model)
    layers, shapes = probe_layers(model, torch.device("cpu"))

    def forward(
        input_ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | int, paged: Paged
    ) -> torch.Tensor:
        logits: torch.Tensor = model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=keep, paged=paged
        ).logits
        return logits[0]

    for module in (decodes, mixed):
        monkeypatch.setattr(module, "copy_into", lambda *_: None)
    launched: list[Any] = []
    monkeypatch.setattr(type(paged_attention._attend), "run", lambda kernel, *_, **__: launched.append(kernel))
    lines: list[str] = []
    with FakeTensorMode(), torch.inference_mode():
        move(model, dtype)
        backend = TritonPaged(num_processors=132)
        backend.allocate(layers, 65, 16, dtype, CUDA)
        replace_mixers(model, monkeypatch)
        how = (Rows(5, 96, 16, CUDA), backend, forward)
        states = States.allocate(shapes, 5, CUDA)
        kinds = [decodes.DecodeSteps(*how, states=states), mixed.MixedSteps(*how, 20, states)]
        graphs = StepGraphs(kinds, how[0])
        graphs.capture(run_before, lines.append)
    assert launched
    return graphs, [line for line in lines if "failed" in line], {kernel.fn.__name__ for kernel in launched}


def make(kind: str, **changes: Any) -> PreTrainedModel:
    interface.register()
    return make_model(kind, make_config(kind, **changes), interface.IMPLEMENTATION)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in KINDS else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS + OTHER_KINDS
        if kind not in EXPERTS | WITH_STATES
    ],
)
def test_a_step_reads_no_number_from_the_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, failed, _ = capture_steps(make(kind), torch.float32, monkeypatch)
    assert not failed
    assert (graphs.sizes("decodes"), graphs.sizes("mixed")) == ([1, 2, 4], [16, 20])


@pytest.mark.parametrize(
    "kind", [kind if kind == "qwen3_moe" else pytest.param(kind, marks=pytest.mark.slow) for kind in sorted(EXPERTS)]
)
def test_a_step_of_experts_reads_none_on_an_h100(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 on 9.0, torch's grouped product gets the experts' numbers of tokens on the device."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    graphs, failed, _ = capture_steps(make(kind), torch.bfloat16, monkeypatch)
    assert not failed
    assert (graphs.sizes("decodes"), graphs.sizes("mixed")) == ([1, 2, 4], [16, 20])


@pytest.mark.parametrize("kind", sorted(LAUNCHED_BY.keys() - REJECTED))
def test_a_step_with_states_reads_none_either(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, failed, launched = capture_steps(make(kind), torch.float32, monkeypatch)
    assert not failed
    assert (graphs.sizes("decodes"), graphs.sizes("mixed")) == ([1, 2, 4], [16, 20])
    assert launched >= LAUNCHED_BY[kind]


@pytest.mark.parametrize("quantization", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_step_with_weights_of_few_bits_reads_none_either(
    kind: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", ())
    monkeypatch.setattr(gpu_trial, "same", lambda *_: True)
    monkeypatch.setattr(gpu_packing, "compare_experts", lambda *_: "")
    model = make(kind, hidden_size=64, intermediate_size=128, moe_intermediate_size=64)
    lines: list[str] = []
    pack_model(model, quantization, torch.device("cpu"), lines.append)
    assert " kept=0 " in lines[0]
    _, failed, launched = capture_steps(model, torch.float32, monkeypatch)
    assert not failed
    assert {"_multiply_packed", "_multiply_packed_row"} <= launched
    assert ({"_plan_tiles", "_multiply_experts"} <= launched) == (kind == "qwen3_moe")
