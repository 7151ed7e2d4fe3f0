"""Lets the kernels for GPUs run where the tests run, for the tests of models."""

import pytest

from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.models import gpu_trial


@pytest.fixture
def triton_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "why_missing", lambda device: None)
    monkeypatch.setattr(native, "why_missing", lambda: "not wanted")


@pytest.fixture
def few_rows(triton_runs_here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trial of the kernels have fewer numbers of rows: the interpreter is slow."""
    monkeypatch.setattr(gpu_trial, "_TRIED_ROWS", (1, 2, 257))
