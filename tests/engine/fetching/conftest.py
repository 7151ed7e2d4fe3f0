"""Fixtures of the tests of `fetch`."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import botocore.session
import pytest
from tests.engine.fetching.buckets import Server, running_server, set_keys
from tests.engine.fetching.hubs import Fetch, running_hub, write_repository

from conveyor_engine.fetching.fetch import fetch
from conveyor_engine.fetching.preview import NO_TASK
from e2e.hub.server import Hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The hub's folder, which has the repository `org/tiny`."""
    folder = tmp_path / "hub"
    write_repository(folder / "org" / "tiny")
    return folder


@pytest.fixture
def hub(root: Path) -> Iterator[Hub]:
    with running_hub(root) as started:
        yield started


@pytest.fixture
def fetch_from(monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """A function that runs `fetch` in this process, from this hub and with this token.

    Most repositories of these tests are no models, so they are for no task.
    """

    def run(hub_url: str, uri: str, target: Path, token: str = "", adapter: str = "", task: str = NO_TASK) -> None:
        monkeypatch.setenv("HF_ENDPOINT", hub_url)
        monkeypatch.setenv("HF_TOKEN", token)
        fetch(uri, str(target), adapter, task)

    return run


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "tiny"


@pytest.fixture(autouse=True, scope="session")
def _protocols_read_once() -> Iterator[None]:
    """Loads botocore's description of S3 only once, because that takes half a second and there are eighty sessions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", cache(botocore.session.create_loader))
        yield


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, root: Path) -> Iterator[Server]:
    """A server with the content of `root` under `URI`. Its keys are in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with running_server() as started:
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", started.url)
        set_keys(monkeypatch, "any", "any")
        started.upload(root / "org/tiny", "teams/a/tiny")
        started.requests.clear()
        yield started
