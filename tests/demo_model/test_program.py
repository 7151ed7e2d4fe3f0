"""The program that is made here, as the engine serves it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.processes import EngineServer

from e2e.demo.tasks import TASKS
from e2e.demo_model import PROGRAM, make


@pytest.mark.slow
def test_the_demo_s_request_is_answered_as_by_the_program_alone(tmp_path: Path) -> None:
    make(tmp_path / "custom", PROGRAM)
    task = TASKS["custom"]
    rows = torch.tensor(task.body["inputs"][0]["data"], dtype=torch.float32)
    expected = torch.export.load(tmp_path / "custom" / "model.pt2").module()(rows).detach().numpy()
    with EngineServer(tmp_path / "engine", tmp_path / "custom") as engine:
        answer = engine.wait_ready().post(task.path, task.body).json()
    assert np.abs(np.reshape(answer["outputs"][0]["data"], (2, 3)) - expected).max() < 1e-5
    assert task.describe(answer)[0].startswith("output: ")
