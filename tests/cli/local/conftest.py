"""Fixtures for the tests of `conveyor run`: a real API server to compare with, models, and a run that tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.conftest import api, crd, services, services_in_default
from tests.cli.local.running import Running, build_service
from tests.engine.chat_model import write_chat_model

__all__ = ["api", "crd", "services", "services_in_default"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the volume `models`."""
    folder = tmp_path_factory.mktemp("models")
    write_chat_model(folder / "chat")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Running]:
    """A run of one service with one engine, which is ready."""
    with Running(tmp_path_factory.mktemp("run"), models, build_service()) as running:
        yield running.wait_ready()
