"""The limits of the container and what its kernel counts, with both versions of cgroups."""

from pathlib import Path

import pytest

from conveyor_engine import cgroup
from conveyor_engine.cgroup import count_oom_kills, free_memory_bytes, num_cpus

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the machine's own cgroup."""
    monkeypatch.setattr(cgroup, "_CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("quota", "cpus"), [("100000 100000", 1), ("150000 100000", 2), ("50000 100000", 1)])
def test_the_containers_cpu_limit_counts(folder: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cpus: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (folder / "cpu.max").write_text(quota)
    assert num_cpus() == cpus


def test_without_a_limit_every_cpu_of_the_affinity_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert num_cpus() == 8
    (folder / "cpu.max").write_text("max 100000")
    assert num_cpus() == 8


def test_the_first_cgroup_version_is_read_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    (folder / "cpu").mkdir()
    (folder / "cpu/cpu.cfs_quota_us").write_text("300000")
    (folder / "cpu/cpu.cfs_period_us").write_text("100000")
    assert num_cpus() == 3


def test_the_containers_memory_limit_counts_but_not_its_file_cache(folder: Path) -> None:
    (folder / "memory.max").write_text(str(GIB // 2))
    (folder / "memory.current").write_text(str(GIB // 4))
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 8}\n")
    assert free_memory_bytes() == GIB // 2 - GIB // 4 + GIB // 8


def test_without_a_memory_limit_the_machines_free_memory_counts(folder: Path) -> None:
    (folder / "memory.max").write_text("max")
    (folder / "memory.current").write_text("1")
    assert free_memory_bytes() > GIB // 16


def test_the_kernel_s_count_is_read_with_both_versions_of_cgroups(folder: Path) -> None:
    assert count_oom_kills() == 0
    (folder / "memory").mkdir()
    (folder / "memory/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert count_oom_kills() == 2
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 1\n")
    assert count_oom_kills() == 1


def test_a_process_that_ends_by_a_signal_without_a_name_is_explained() -> None:
    _, message = cgroup.explain_exit("the engine process", -35, 0)
    assert message == "the engine process was ended by signal 35"
