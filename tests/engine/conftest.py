"""Fixtures of the engine's tests. Torch has one thread, because cores are shared and OpenMP does not pay here."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

if TYPE_CHECKING:
    from tests.engine.processes import EngineServer
    from tests.engine.references import Reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Reference]":
    """A tiny model of a kind: its directory, prompts, and the answers of `generate`. Made once per session."""
    from tests.engine.references import Reference

    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(kind, Path(tmp_path_factory.mktemp(kind)))
        return made[kind]

    return get


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template, in a directory called `tiny`."""
    from tests.engine.chat_model import write_chat_model

    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[EngineServer]":
    """A ready engine server for all tests that do not change it.

    It has two places in the batch and two in the queue.
    """
    from tests.engine.processes import EngineServer

    folder = tmp_path_factory.mktemp("server")
    with EngineServer(folder, chat_model, max_num_seqs=2, max_num_queued_requests=2) as started:
        yield started.wait_ready()
