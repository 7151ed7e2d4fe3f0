"""Fixtures that install the task of `softmax/`, as another package would."""

from pathlib import Path

import pytest
from tests.engine.tasks.softmax_model import install_softmax


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of installed packages."""
    return install_softmax(tmp_path_factory.mktemp("packages"))
