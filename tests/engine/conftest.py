"""Fixtures of the engine's tests. One thread: the cores are shared, and OpenMP's regions cost more than they give."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

if TYPE_CHECKING:
    from tests.engine.references import Reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Reference]":
    """A tiny model of a kind: its directory, prompts, and what `generate` answers to them. Made once per session."""
    from tests.engine.references import Reference

    made: dict[str, Reference] = {}

    def get(kind: str) -> Reference:
        if kind not in made:
            made[kind] = Reference(kind, Path(tmp_path_factory.mktemp(kind)))
        return made[kind]

    return get
