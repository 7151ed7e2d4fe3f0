"""Two of the clients of `e2e.clients`, as their users install them; `make clients` tries them all."""

import pytest

from e2e import kube
from e2e.clients.matrix import CLIENTS
from e2e.clients.runner import Target, run
from e2e.demo_model import demo_model_directory
from e2e.gateway import service_url
from e2e.services import service

TRIED = ("openai (Python)", "guidellm")


@pytest.mark.nightly
@pytest.mark.timeout(900)  # their environments are made first
def test_clients_work_as_they_are_installed(namespace: str) -> None:
    kube.apply(service("clients"), namespace)
    kube.wait_ready("clients", namespace)
    target = Target(service_url("clients", namespace), "clients", demo_model_directory())
    tried = [client for client in CLIENTS if client.name in TRIED]
    assert [run(client, target) for client in tried] == ["8 of 8 checks", "20 of 20 requests"]
