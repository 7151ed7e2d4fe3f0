"""Fixture of a server for the APIs other than chat. Its model has tools and thinking."""

from collections.abc import Iterator

import pytest
from tests.engine.serving.http.agents import AgentServer, start_agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    with start_agent(tmp_path_factory.mktemp("agent")) as started:
        started.wait_ready()
        yield started
