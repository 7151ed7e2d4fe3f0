"""Tests what is detected about the machine, and what is rejected because of it."""

from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine
from conveyor_engine.execution.machine import choose_dtype

CPU = torch.device("cpu")


def test_float16_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="float16"):
        choose_dtype("float16", CPU, PretrainedConfig())


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : avx2 avx512f avx512_bf16", torch.bfloat16),
        ("flags : amx_tile amx_bf16", torch.bfloat16),
        ("Features : asimd bf16", torch.bfloat16),
        ("flags : avx2 avx512f avx512_vnni", torch.float32),
    ],
)
def test_auto_is_bfloat16_only_where_the_cpu_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, dtype: torch.dtype
) -> None:
    (tmp_path / "cpuinfo").write_text(flags + "\n")
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    assert choose_dtype("auto", CPU, PretrainedConfig()) == dtype


@pytest.mark.parametrize(
    ("saved", "dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_auto_on_a_gpu_is_bfloat16_unless_the_model_was_saved_in_float16(
    saved: torch.dtype, dtype: torch.dtype
) -> None:
    assert choose_dtype("auto", torch.device("cuda"), PretrainedConfig(dtype=saved)) == dtype


def test_a_configured_dtype_is_used() -> None:
    assert choose_dtype("bfloat16", CPU, PretrainedConfig()) == torch.bfloat16
