"""Fixtures for tests of programs of torch.export."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.tasks.custom.programs import WRITERS


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    """Return a function that returns a folder with a program of a kind, and the module that it was exported from."""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def get(kind: str) -> tuple[Path, torch.nn.Module]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, WRITERS[kind](folder)
        return made[kind]

    return get
