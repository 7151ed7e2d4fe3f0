"""Installs the task of `softmax/` as another package would, and makes a model for it."""

import json
from pathlib import Path


def install_softmax(folder: Path) -> Path:
    """Write the metadata that pip writes for an installed package."""
    metadata = folder / "softmax_task-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: softmax-task\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[conveyor.tasks]\nsoftmax = tests.engine.tasks.softmax\n")
    return folder


def write_softmax_model(folder: Path, temperature: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "softmax.json").write_text(json.dumps({"temperature": temperature, "numbers_max": 8}))
    return folder
