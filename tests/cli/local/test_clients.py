"""Clients of the matrix get from a run what they get from a cluster: the same programs, service and model."""

from collections.abc import Iterator

import pytest
from tests.cli.local.running import Running

from e2e.clients.__main__ import SERVICES
from e2e.clients.matrix import CLIENTS, Client
from e2e.clients.runner import Target
from e2e.clients.runner import run as run_client
from e2e.demo_model import DEMO, demo_model_directory

NAMES = ("openai (Python)", "openai (Python), responses", "anthropic")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    model = demo_model_directory(DEMO)  # trains it, once
    with Running(tmp_path_factory.mktemp("clients"), model.parent, SERVICES["generate"]) as running:
        running.wait_ready()
        name = SERVICES["generate"]["metadata"]["name"]
        yield Target(f"{running.root}/default/{name}/v1", name, model)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", [each for each in CLIENTS if each.name in NAMES], ids=lambda client: client.name)
def test_a_client_of_the_matrix_is_served(client: Client, target: Target) -> None:
    assert run_client(client, target)
