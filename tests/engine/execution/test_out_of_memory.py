"""Checks that a start that runs out of memory reports it, wherever it happens, and leaves no half-fused model."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.encoders import save_encoder
from tests.engine.tiny_models import save_tiny_model
from transformers import PreTrainedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.interface import Probe
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.execution.build import build_runner
from conveyor_engine.execution.models import last_layer, linear, packing, recognise, trial
from conveyor_engine.tasks.generate.execution import runner

NO_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 MiB."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("could not create a memory object"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"),
    OSError(12, "Cannot allocate memory"),
    MemoryError(),
)
BROKEN = torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


def fail_at(call: int, error: BaseException, original: Callable[..., object]) -> Callable[..., object]:
    """Return `original` wrapped so that its call with this number raises the error."""
    calls = iter(range(call))

    def fail(*arguments: object, **named: object) -> object:
        if next(calls, None) is None:
            raise error
        return original(*arguments, **named)

    return fail


PLACES: dict[str, tuple[object, str, int]] = {
    "weights on their way to the device": (PreTrainedModel, "to", 0),
    "the first forward": (Probe, "attend", 0),
    "merged projections of the second layer": (recognise, "build_linear", 5),
    "the trial of a layer": (trial.Recorder, "attend", 6),
    "the trial of the last layer": (last_layer, "_logits", 0),
    "the KV cache": (TorchPaged, "allocate", 1),
    "the sampler": (runner, "Sampler", 0),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: str(error)[:12])
def test_a_start_without_memory_fails_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    owner, name, call = PLACES[place]
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    monkeypatch.setattr(owner, name, fail_at(call, error, getattr(owner, name)))
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ModelError, match=r"too little memory .* use a device with more memory") as caught:
        build_runner(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=64))
    assert caught.value.reason == "OutOfMemory"
    assert type(error).__name__ in str(caught.value)


@pytest.mark.parametrize("owner", [packing, linear])
def test_a_model_that_embeds_does_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object) -> None:
    name = "_compute_packed" if owner is packing else "build_plain"
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    monkeypatch.setattr(owner, name, fail_at(0, NO_MEMORY[0], getattr(owner, name)))
    save_encoder("qwen3", tmp_path)
    with pytest.raises(ModelError, match="too little memory") as caught:
        build_runner(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    assert caught.value.reason == "OutOfMemory"


@pytest.mark.parametrize("place", PLACES)
def test_a_device_that_breaks_is_no_fault_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    owner, name, call = PLACES[place]
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")
    monkeypatch.setattr(owner, name, fail_at(call, BROKEN, getattr(owner, name)))
    save_tiny_model("llama", tmp_path)
    with pytest.raises(torch.AcceleratorError):
        build_runner(EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", max_model_len=64))
