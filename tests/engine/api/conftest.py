"""A tiny chat model and an engine server that serves it: one for all tests that only ask it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory called `tiny`."""
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """Ready, with 4 places in a batch."""
    with EngineServer(tmp_path_factory.mktemp("server"), chat_model, max_num_seqs=4) as started:
        yield started.wait_ready()
