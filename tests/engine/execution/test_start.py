"""Checks that every runner starts alike: on the given device, with the same log lines, after its largest step."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.encoders import save_encoder
from tests.engine.references import Reference
from tests.engine.tiny_models import VOCAB_SIZE, save_tiny_model

from conveyor_engine import cgroup
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import machine, native, start
from conveyor_engine.execution.attention.backend import LayerShape
from conveyor_engine.execution.graphs.cuda import run_again
from conveyor_engine.execution.models import fuse
from conveyor_engine.execution.models.kinds import TEXT_ENCODER
from conveyor_engine.execution.placement import Placement, open_placement
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.tasks.embed.execution.text_runner import PoolRunner
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LOADING = ["event=model_loading", "event=model_fused", "event=model_loaded"]
Runner = type[GenerateRunner] | type[PoolRunner]


def save(runner: Runner, directory: Path) -> EngineConfig:
    save_tiny_model("llama", directory) if runner is GenerateRunner else save_encoder("bert", directory)
    return EngineConfig(model=str(directory), device="cuda", dtype="float32", max_num_seqs=4, warmup=False)


@pytest.mark.parametrize(
    ("runner", "own"),
    [
        (GenerateRunner, ["event=kv_cache_allocated"]),
        (PoolRunner, ["event=pooling_chosen", "event=outputs_chosen", "event=largest_step_fits"]),
    ],
)
def test_a_runner_starts_on_the_device_that_it_is_given(tmp_path: Path, runner: Runner, own: list[str]) -> None:
    lines: list[str] = []
    config, placement = save(runner, tmp_path), Placement(CPU)
    started = (
        PoolRunner(config, placement, lines.append, TEXT_ENCODER)
        if runner is PoolRunner
        else GenerateRunner(config, placement, lines.append)
    )
    assert started.facts.device == "cpu", "not the configured one, which is not here"
    assert [line.split()[0] for line in lines] == [*LOADING, *own]
    assert [line.endswith(" task=embed") for line in lines[:1]] == [runner is PoolRunner]


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("configured", "environment", "expected"), [(3, None, 3), (3, "7", 3), (None, None, 5), (None, "7", 2)]
)
def test_a_cpu_gets_its_threads_by_configuration_environment_or_limit(
    monkeypatch: pytest.MonkeyPatch, configured: int | None, environment: str | None, expected: int
) -> None:
    """torch reads OMP_NUM_THREADS when it is imported. Its number, 2 here, stays."""
    torch.set_num_threads(2)
    monkeypatch.setattr(cgroup, "num_cpus", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if environment is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    placement = open_placement(EngineConfig(model="-", device="cpu", num_threads=configured))
    assert placement == Placement(CPU, rank=0, world_size=1)
    assert torch.get_num_threads() == expected


@pytest.mark.skipif(native.why_missing() is not None, reason="needs the compiled kernels")
def test_a_step_has_room_for_copies_of_states_only_if_transformers_computes_them(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    allocate = RunnerStart.allocate_cache

    def note(self: RunnerStart, *given: Any, **named: Any) -> int:
        noted.append(given[3])
        return allocate(self, *given, **named)

    monkeypatch.setattr(RunnerStart, "allocate_cache", note)
    config = reference("qwen3_5_text").make_config(attention_backend="auto")
    states = GenerateRunner(config, Placement(CPU))._states
    monkeypatch.setattr(fuse, "mixer_of", lambda _: None)
    GenerateRunner(config, Placement(CPU))
    assert states is not None
    layer_bytes = sum(pool[0].nbytes for key, pool in states.pools.items() if key.layer == 0)
    assert noted[1] - noted[0] == 4 * config.max_num_seqs * layer_bytes


def test_a_gpu_runs_a_step_to_measure_it_and_a_cpu_does_not(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, measured = reference("llama"), list[Any]()
    monkeypatch.setattr(start, "measure_step", lambda device, *given: (measured.append((device, *given[:2])), 9)[1])
    on_gpu, on_cpu = (RunnerStart(ref.make_config(), Placement(device), print) for device in (CUDA, CPU))
    assert on_gpu.find_step_bytes(ref.model, 50, "`a`", pytest.fail, num_logits=4) == 9
    assert measured == [(CUDA, "50 tokens", "`a`")]
    layer = 4 * 2 * max(m.in_features + m.out_features for m in ref.model.model.modules() if hasattr(m, "in_features"))
    assert on_cpu.find_step_bytes(ref.model, 50, "`a`", pytest.fail) == 50 * layer
    assert on_cpu.find_step_bytes(ref.model, 50, "`a`", pytest.fail, num_logits=4) == 50 * layer + 4 * 4 * VOCAB_SIZE


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_kv_cache_gets_what_weights_the_largest_step_and_graphs_leave(
    reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    """Graphs keep the memory of their largest step, and their padding has its own block."""
    ref = reference("llama")
    steps = {5000: 1_000_000, 2048: 300_000}  # by tokens: for the budget, for the largest graph
    monkeypatch.setattr(start, "estimate_step", lambda model, num_tokens, num_logits: steps[num_tokens])
    monkeypatch.setattr(machine, "free_memory_bytes", lambda _: 16_000_000)
    monkeypatch.setattr("conveyor_engine.tasks.generate.execution.runner.peak_bytes", lambda *_: 100_000)
    changes = {"num_kv_blocks": None, "kv_memory_fraction": 0.5, "max_num_batched_tokens": 5000}
    config = ref.make_config(attention_backend="native", **changes)
    runner = GenerateRunner(config, open_placement(config), capture=run_again if has_graphs else None)
    block_bytes = runner.backend.block_bytes([LayerShape(4, 2, 12, 12)] * 3, 16, torch.float32)
    left = 16_000_000 - 1_100_000 - (300_000 + block_bytes if has_graphs else 0)
    assert runner.facts.num_kv_blocks == left // 2 // block_bytes
    assert (runner.graphs is not None) == has_graphs
