"""Checks that our mixers replace transformers' where they compute the same, and only there.

They run on the compiled kernels for CPUs, and on Triton's in its interpreter. `mixer_of` itself compares both: in
chunks, and in a chunk beside a decode, with states that are carried.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.execution import interpreter
from tests.engine.tiny_models import save_tiny_model

from conveyor_engine import execution
from conveyor_engine.execution import native
from conveyor_engine.execution.kernels import states as triton_states
from conveyor_engine.execution.models import gpu_trial, state_mixers
from conveyor_engine.execution.models.gpu_linear import GpuLinear
from conveyor_engine.execution.models.gpu_packing import pack_model
from conveyor_engine.execution.models.loader import load_config, load_model
from conveyor_engine.execution.models.mixers import MixerForward
from conveyor_engine.execution.models.state_mixers import StateMixer, mixer_of
from conveyor_engine.execution.native import states
from conveyor_engine.execution.state_rows import StateRows

pytestmark = pytest.mark.skipif(native.why_missing() is not None, reason="needs the compiled kernels")


def replace_mixers(directory: Path, kind: str, dtype: torch.dtype, **changes: Any) -> list[StateMixer | None]:
    save_tiny_model(kind, directory, **changes)
    model = load_model(str(directory), load_config(str(directory)), dtype, torch.device("cpu"))
    with torch.inference_mode():
        return [mixer_of(part) for part in model.modules() if isinstance(part.forward, MixerForward)]


@pytest.mark.parametrize("instructions", ["generic", "avx2", "avx512", "avx512bf16", "amx"])
@pytest.mark.parametrize("kind", ["falcon_h1", "lfm2", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next"])
def test_every_instruction_set_gives_transformers_numbers(tmp_path: Path, kind: str, instructions: str) -> None:
    before = native.isa()
    if not native.use_isa(instructions):
        pytest.skip(f"this CPU or this build has no {instructions}")
    try:
        for dtype in (torch.float32, torch.bfloat16):
            mixers = replace_mixers(tmp_path, kind, dtype)
            assert mixers
            assert None not in mixers
    finally:
        native.use_isa(before)


@pytest.mark.parametrize("norm_first", [False, True])
def test_falcons_mixer_may_have_a_norm(tmp_path: Path, norm_first: bool) -> None:
    norm = {"mamba_rms_norm": True, "mamba_norm_before_gate": norm_first, "mamba_n_groups": 2}
    assert None not in replace_mixers(tmp_path, "falcon_h1", torch.float32, **norm)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("lfm2", "conv"), ("nemotron_h", "mamba2"), ("nemotron_h", "gated_norm"), ("qwen3_5_text", "delta_rule")],
)
def test_a_mixer_that_computes_otherwise_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernel: str
) -> None:
    right = getattr(states, kernel)
    monkeypatch.setattr(states, kernel, lambda *given, **named: right(*given, **named).roll(1, 0))
    assert set(replace_mixers(tmp_path, kind, torch.float32)) == {None}


@pytest.fixture
def use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if interpreter.HAVE_GPU:
        pytest.skip("the models are on a CPU, for Triton's interpreter")
    monkeypatch.setattr(execution.kernels, "why_missing", lambda device: None)


@pytest.mark.parametrize(
    "kind",
    [
        *("bamba", "lfm2", "qwen3_next"),
        *(
            pytest.param(k, marks=pytest.mark.nightly)
            for k in ("falcon_h1", "granitemoehybrid", "nemotron_h", "olmo_hybrid", "qwen3_5_text")
        ),
    ],
)
def test_triton_gives_transformers_numbers(tmp_path: Path, kind: str, use_triton: None) -> None:
    mixers = replace_mixers(tmp_path, kind, torch.float32)
    assert mixers
    assert None not in mixers


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("lfm2", "conv"), ("nemotron_h", "mamba2"), ("nemotron_h", "gated_norm"), ("qwen3_5_text", "delta_rule")],
)
def test_a_mixer_that_triton_computes_otherwise_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernel: str, use_triton: None
) -> None:
    right = getattr(triton_states, kernel)
    monkeypatch.setattr(triton_states, kernel, lambda *given, **named: right(*given, **named).roll(1, 0))
    assert set(replace_mixers(tmp_path, kind, torch.float32)) == {None}


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [
        ("lfm2", "conv"),
        pytest.param("nemotron_h", "mamba2", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", "delta_rule", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_mixer_that_triton_computes_otherwise_in_16_bits_alone_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, kernel: str, is_wrong: bool, use_triton: None
) -> None:
    right = getattr(triton_states, kernel)

    def compute(rows: StateRows, x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = right(rows, x, *given, **named)
        return out.roll(1, 0) if is_wrong and x.dtype == torch.float16 else out

    monkeypatch.setattr(triton_states, kernel, compute)
    assert {mixer is None for mixer in replace_mixers(tmp_path, kind, torch.float16)} == {is_wrong}


def test_a_state_that_is_too_large_for_triton_is_left_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_triton: None
) -> None:
    monkeypatch.setattr(state_mixers, "_SIZES_MAX_TRITON", (15, 256))
    assert set(replace_mixers(tmp_path, "qwen3_5_text", torch.float32)) == {None}


@pytest.mark.slow
def test_a_mixer_whose_weights_have_few_bits_on_a_gpu_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_triton: None
) -> None:
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1,))
    save_tiny_model("qwen3_5_text", tmp_path, hidden_size=64, intermediate_size=128)
    model = load_model(str(tmp_path), load_config(str(tmp_path)), torch.float16, torch.device("cpu"))
    pack_model(model, "int8", torch.device("cpu"), lambda _: None)
    with torch.inference_mode():
        mixers = [mixer_of(part) for part in model.modules() if isinstance(part.forward, MixerForward)]
    assert len(mixers) == 2
    for mixer in mixers:
        assert mixer is not None
        assert all(isinstance(mixer.get_submodule(name), GpuLinear) for name in mixer.sizes_of_inputs)
