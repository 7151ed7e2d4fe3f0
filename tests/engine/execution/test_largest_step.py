"""Checks that a model whose largest step does not fit into memory does not start, and that the error names settings."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.embedding_cores import make_core
from tests.engine.encoders import CONTEXT_TOKENS, save_encoder

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.execution import machine
from conveyor_engine.execution.largest_step import measure_step
from conveyor_engine.execution.models.kinds import TEXT_ENCODER
from conveyor_engine.execution.placement import Placement
from conveyor_engine.execution.start import RunnerStart
from conveyor_engine.tasks.embed.execution.text_runner import PoolRunner

CUDA = torch.device("cuda")
MIB = 2**20


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the peak memory that CUDA reports. The weights take 3 MiB of it."""
    stats = {"memory_allocated": 3 * MIB, "max_memory_allocated": 3 * MIB}
    for name in stats:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: stats[name])
    for name in ("reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    return lambda num_bytes: stats.update(max_memory_allocated=num_bytes)


def test_a_step_is_measured_beside_the_weights(peak: Callable[[int], None]) -> None:
    assert measure_step(CUDA, "9 tokens", "", lambda: peak(10 * MIB)) == 7 * MIB


def test_a_step_that_does_not_fit_names_the_settings(peak: Callable[[int], None]) -> None:
    def run() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(ModelError, match=r"a step of 9 tokens does not fit.*; lower `max_model_len`") as caught:
        measure_step(CUDA, "9 tokens", "`max_model_len`", run)
    assert caught.value.reason == "OutOfMemory"


@pytest.mark.parametrize(
    ("budget", "more", "lengths"),
    [
        (50, 0, [CONTEXT_TOKENS]),
        (150, 0, [CONTEXT_TOKENS, CONTEXT_TOKENS, 22]),
        (900, 0, [CONTEXT_TOKENS] * 4),
        (900, 24, [CONTEXT_TOKENS] * 5 + [32]),
    ],
)
def test_the_largest_step_of_a_model_that_embeds_is_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    peak: Callable[[int], None],
    budget: int,
    more: int,
    lengths: list[int],
) -> None:
    """The longest prompt runs alone if it exceeds the budget. There are four rows, which may each bring a query."""
    save_encoder("bert", tmp_path)
    runner = make_core(tmp_path, max_num_batched_tokens=budget).executor
    assert isinstance(runner, PoolRunner)
    ran: list[int] = []
    config = EngineConfig(model=str(tmp_path), dtype="float32", max_num_seqs=4, max_num_batched_tokens=budget)
    monkeypatch.setattr(runner, "_compute", lambda prompts: ran.extend(len(prompt.token_ids) for prompt in prompts))
    runner.find_step_bytes(RunnerStart(config, Placement(CUDA), print, TEXT_ENCODER), more_tokens=more)
    assert ran == lengths


def test_an_engine_that_embeds_does_not_start_where_its_largest_step_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_encoder("bert", tmp_path)
    monkeypatch.setattr(machine, "free_memory_bytes", lambda _: 10_000)
    message = f"a step of {CONTEXT_TOKENS} tokens .* lower `max_num_batched_tokens` or `max_model_len`"
    with pytest.raises(ModelError, match=message) as caught:
        make_core(tmp_path)
    assert caught.value.reason == "OutOfMemory"
