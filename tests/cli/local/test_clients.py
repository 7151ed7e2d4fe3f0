"""Clients of the matrix get from a run what they get from a cluster: the same programs and the same service."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.local.running import Running

from e2e.clients.__main__ import SERVICES
from e2e.clients.client import Client, Task
from e2e.clients.matrix import CLIENTS
from e2e.clients.runner import Target
from e2e.clients.runner import run as run_client
from e2e.demo_model import DEMO, SCRIPT, SEEING, demo_model_directory

NAMES = ("openai (Python)", "anthropic")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("clients")
    model = shutil.copytree(models / "chat", folder / DEMO)
    template = model / "chat_template.jinja"
    template.write_text(re.sub(r"{% if message\['role'\] == 'system' %}.*?{% endif %}", "", template.read_text()))
    service = SERVICES["generate"]
    name, cache = service["metadata"]["name"], {"blockBudget": 1024}  # the context is longer than the demo's
    with Running(folder / "run", folder, {**service, "spec": {**service["spec"], "kvCache": cache}}) as running:
        running.wait_ready()
        yield Target(f"{running.root}/default/{name}/v1", name, model)


@contextmanager
def serving(folder: Path, task: Task, name: str) -> Iterator[Target]:
    """Serve a model of `e2e.demo_model` as the task's service."""
    model, service = demo_model_directory(name), SERVICES[task]
    with Running(folder, model.parent, service) as running:
        running.wait_ready()
        yield Target(f"{running.root}/default/{service['metadata']['name']}/v1", service["metadata"]["name"], model)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with serving(tmp_path_factory.mktemp("script"), "script", SCRIPT) as target:
        yield target


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with serving(tmp_path_factory.mktemp("see"), "see", SEEING) as target:
        yield target


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", [each for each in CLIENTS if each.name in NAMES], ids=lambda client: client.name)
def test_a_client_of_the_matrix_is_served(client: Client, target: Target) -> None:
    assert run_client(client, target)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", [each for each in CLIENTS if each.task == "script"], ids=lambda client: client.name)
def test_a_client_of_the_model_with_written_answers_is_served(client: Client, scripted: Target) -> None:
    assert run_client(client, scripted)


@pytest.mark.nightly  # trains for minutes where the cache has no model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", [each for each in CLIENTS if each.task == "see"], ids=lambda client: client.name)
def test_a_client_of_the_model_that_sees_is_served(client: Client, seeing: Target) -> None:
    assert run_client(client, seeing)
