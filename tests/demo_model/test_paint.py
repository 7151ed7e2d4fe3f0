"""The diffusion model that is trained here, as the engine serves it."""

from pathlib import Path

import pytest
from tests.engine.processes import EngineServer

from e2e.demo.tasks import TASKS
from e2e.demo_model import PAINTER, demo_model_directory


@pytest.mark.nightly  # trains for two minutes where the cache has no model
@pytest.mark.timeout(1800)
def test_pictures_of_red_are_red(tmp_path: Path) -> None:
    task = TASKS["image-generate"]
    with EngineServer(tmp_path, demo_model_directory(PAINTER), num_threads=1) as engine:
        engine.wait_ready()
        answer = engine.post(task.path, task.body | {"prompt": "a red square", "n": 4})
        lines = task.describe(answer.json())
        assert sum(line.endswith("32x32, red") for line in lines) >= 3, lines
