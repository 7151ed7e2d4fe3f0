"""Fixtures of the tests of `fetch`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.fetching.hubs import Fetch, running_hub, write_repository

from conveyor_engine.fetching.fetch import fetch
from e2e.hub.server import Hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The hub's folder, with the repository `org/tiny` in it."""
    folder = tmp_path / "hub"
    write_repository(folder / "org" / "tiny")
    return folder


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with running_hub(root) as started:
        yield started


@pytest.fixture
def fetch_from(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """`fetch` in this process, from this hub, with this token."""

    def run(hub_url: str, uri: str, target: Path, token: str = "") -> None:
        monkeypatch.setenv("HF_ENDPOINT", hub_url)
        monkeypatch.setenv("HF_TOKEN", token)
        fetch(uri, str(target))

    return run


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"
