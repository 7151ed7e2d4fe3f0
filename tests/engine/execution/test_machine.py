"""What is found out about the machine, and what is refused because of it."""

from pathlib import Path

import pytest
import torch
from transformers import PretrainedConfig

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import machine
from conveyor_engine.execution.machine import choose_dtype

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cgroup folder in place of the machine's own."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    return tmp_path


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


def test_a_dtype_that_is_asked_for_is_taken() -> None:
    assert choose_dtype("bfloat16", CPU, PretrainedConfig()) == torch.bfloat16


@pytest.mark.parametrize(("quota", "cpus"), [("100000 100000", 1), ("150000 100000", 2), ("50000 100000", 1)])
def test_the_containers_cpu_limit_counts(cgroup: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (cgroup / "cpu.max").write_text(quota)
    assert machine.num_cpus() == cpus


def test_without_a_limit_every_cpu_of_the_affinity_counts(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert machine.num_cpus() == 8
    (cgroup / "cpu.max").write_text("max 100000")
    assert machine.num_cpus() == 8


def test_the_first_cgroup_version_is_read_too(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (cgroup / "cpu").mkdir()
    (cgroup / "cpu/cpu.cfs_quota_us").write_text("300000")
    (cgroup / "cpu/cpu.cfs_period_us").write_text("100000")
    assert machine.num_cpus() == 3


def test_the_containers_memory_limit_counts_but_not_its_file_cache(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(str(GIB // 2))
    (cgroup / "memory.current").write_text(str(GIB // 4))
    (cgroup / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 8}\n")
    assert machine.free_memory_bytes(CPU) == GIB // 2 - GIB // 4 + GIB // 8


def test_without_a_memory_limit_the_machines_free_memory_counts(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max")
    (cgroup / "memory.current").write_text("1")
    assert machine.free_memory_bytes(CPU) > GIB // 16
