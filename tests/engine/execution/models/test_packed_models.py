"""Compares whole models whose weights keep few bits on a GPU with transformers over the restored weights in float32.

Without a GPU, an engine runs in Triton's interpreter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.execution.interpreter import DEVICE, ON_DEVICE
from tests.engine.execution.models.test_expert_grids import keep, to_gptq
from tests.engine.execution.models.test_gguf import save
from tests.engine.execution.models.test_gpu_experts import to_mxfp4_experts, to_nvfp4
from tests.engine.execution.models.test_quantized import declare, quantize
from tests.engine.references import Reference, add, run, tokens_of
from tests.engine.tiny_models import greedy, save_tiny_model

from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.models import gpu_trial
from conveyor_engine.execution.models.gpu_experts import GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.gguf.unpack import unpack
from conveyor_engine.tasks.generate.execution import runner

# From the sigmoid of a large negative number, which is correctly 0.
pytestmark = [
    pytest.mark.slow, pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"), *ON_DEVICE
]  # fmt: skip
PROMPT, NUM_TOKENS = [5, 17, 3, 99, 42, 8], 4
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def write_nvfp4(folder: Path) -> Path:
    save_tiny_model("qwen3", folder, **SIZES)
    quantize(folder, lambda layer, weight: (to_nvfp4 if "layers." in layer else keep)(layer, weight))
    declare(folder, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    return folder


def write_mxfp4(folder: Path) -> Path:
    save_tiny_model("gpt_oss", folder, hidden_size=64, intermediate_size=64)
    to_mxfp4_experts(folder)
    return folder


def write_ordered_gptq(folder: Path) -> Path:
    generator = torch.Generator().manual_seed(0)

    def change(layer: str, weight: torch.Tensor) -> Any:
        if "layers." not in layer:
            return keep(layer, weight)
        order = torch.randperm(weight.shape[1], generator=generator)
        return to_gptq(layer, weight) | {f"{layer}.g_idx": (torch.arange(weight.shape[1]) // 32)[order].int()}

    save_tiny_model("llama", folder, **SIZES)
    quantize(folder, change)
    declare(folder, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True})
    return folder


def write_gguf(stored: str, folder: Path) -> Path:
    return unpack(save("llama", folder, stored, num_hidden_layers=1)[0])


WRITE: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "NVFP4": (write_nvfp4, {"fp4"}),
    "MXFP4": (write_mxfp4, {"fp4"}),
    "GPTQ, sorted columns": (write_ordered_gptq, {"int4"}),
    "Q4_K": (lambda folder: write_gguf("Q4_K", folder), {"int4"}),
    "Q6_K": (lambda folder: write_gguf("Q6_K", folder), {"int8"}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each == "MXFP4" else pytest.mark.nightly) for each in WRITE]
)
def test_an_engine_over_packed_weights_gives_transformers_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(kernels, "why_missing", lambda device: None)
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", ())
    monkeypatch.setattr(runner, "select_backend", lambda *_: TritonPaged(num_processors=16))
    write, kinds = WRITE[name]
    reference = Reference.__new__(Reference)
    reference.directory = write(tmp_path)
    core = reference.make_core(attention_backend="auto", device=DEVICE.type)
    add(core, "0", PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = tokens_of(run(core)["0"])
    plain: Any = load_model(
        str(reference.directory), load_config(str(reference.directory)), torch.float32, torch.device("cpu")
    )
    plain.set_attn_implementation("eager")
    assert found == greedy(plain, PROMPT, NUM_TOKENS, eos_token_id=-1)
    parts = list(core.executor.model.modules())  # type: ignore[attr-defined]
    packed = [part.packed.kind for part in parts if isinstance(part, GpuLinear)]
    packed += [part.down.kind for part in parts if isinstance(part, GpuExperts)]
    assert set(packed) == kinds
