"""Tests a real gateway, a real API server and a real engine that answers only gateways."""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack
from tests.kubectl import kubectl

from conveyor_api import names
from conveyor_api.served_name import root_name
from conveyor_kube.issuer import DISCOVERY_PATH, KEYS_PATH, Issuer
from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.callers import build_callers
from e2e.cluster.api import Api
from e2e.cluster.definitions import claim_name
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


class Accounts:
    """ServiceAccounts in the test's namespace, which is the gateways' one as well."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self.namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/serviceaccounts"

    def make(self, name: str) -> None:
        self._api.create(self._path, {"metadata": {"name": name}})

    def issue(self, name: str, audience: str) -> str:
        """Return a token, as `kubectl create token NAME --audience` does."""
        spec = {"audiences": [audience], "expirationSeconds": 600}
        token: str = self._api.create(f"{self._path}/{name}/token", {"spec": spec})["status"]["token"]
        return token


@pytest.fixture
def accounts(crd: Api, namespace: str) -> Accounts:
    accounts = Accounts(crd, namespace)
    accounts.make("qwen-engine")
    accounts.make("web")
    return accounts


@pytest.fixture
def callers_file(tmp_path: Path, kubeconfig: Path, namespace: str) -> Path:
    """The file that the operator writes."""
    paths = (DISCOVERY_PATH, KEYS_PATH)
    discovery, published = (json.loads(kubectl(kubeconfig, namespace, "get", "--raw", path)) for path in paths)
    issuer = Issuer(discovery["issuer"], tuple(published["keys"]))
    body = build_callers(build_owner(namespace, "qwen", "1"), f"{namespace}/gate", issuer)
    file = tmp_path / names.CALLERS_KEY
    file.write_text(body["data"][names.CALLERS_KEY])
    return file


@pytest.fixture
def engine(tmp_path: Path, callers_file: Path) -> Iterator[EngineServer]:
    model, options = write_chat_model(tmp_path / "tiny"), {"host": "0.0.0.0", "max_num_seqs": 8}
    with EngineServer(tmp_path / "engine", model, IDLE, callers_file=callers_file, **options) as started:
        yield started.wait_ready()


@pytest.fixture
async def stack(kubeconfig: Path, crd: Api, namespace: str, engine: EngineServer) -> AsyncIterator[Stack]:
    flags = ("--watch-namespaces", namespace, "--system-namespace", namespace, "--service-account", "gate")
    claim_name(crd, namespace, root_name(namespace))
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, Cluster(crd, namespace))
        await stack.apply_service(queue={"timeout": "20s"})
        await stack.add_engine(int(engine.url.rpartition(":")[2]))
        yield stack


async def complete(url: str, token: str = "") -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as http, http.post(url, json=BODY, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_clients_reach_the_engine_through_the_gateway_alone(
    stack: Stack, engine: EngineServer, accounts: Accounts, namespace: str
) -> None:
    accounts.make("gate")
    assert (await complete(stack.completions))[0] == 200
    direct, audience = f"{engine.url}/v1/completions", names.engine_audience(namespace)
    expected = {
        "": 401,
        accounts.issue("qwen-engine", audience): 200,
        accounts.issue("web", audience): 401,
        accounts.issue("qwen-engine", names.TOKEN_AUDIENCE): 401,
        accounts.issue("gate", names.engine_audience("another")): 401,
    }
    for token, status in expected.items():
        assert (await complete(direct, token))[0] == status
    async with aiohttp.ClientSession() as http, http.get(f"{stack.gateway.url}/{stack.key}/openapi.json") as answer:
        assert "/v1/completions" in (await answer.json())["paths"]  # which the engine has sent


async def test_a_gateway_that_sends_no_token_yet_fails_no_request(
    stack: Stack, engine: EngineServer, accounts: Accounts, tmp_path: Path
) -> None:
    """During an upgrade, a gateway of another release meets engines with and without the check."""
    with EngineServer(tmp_path / "open", tmp_path / "tiny", IDLE, host="0.0.0.0", max_num_seqs=8) as old:
        old.wait_ready()
        await stack.add_engine(int(old.url.rpartition(":")[2]))
        statuses = [(await complete(stack.completions))[0] for _ in range(20)]
        assert statuses == [200] * 20  # by the open engine
        await stack.set_engine_ready(int(old.url.rpartition(":")[2]), ready=False)
        waiting = [asyncio.create_task(complete(stack.completions)) for _ in range(3)]
        await asyncio.sleep(1)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(accounts.make, "gate")  # as if the gateway were a new one
        began = time.monotonic()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 3
        assert time.monotonic() - began < 15


def test_the_page_s_commands_reach_an_engine(
    engine: EngineServer, accounts: Accounts, kubeconfig: Path, namespace: str
) -> None:
    """All but the first command, which needs a kubelet."""
    page = (REPOSITORY / "docs/keys.md").read_text()
    (block,) = re.findall(r"```sh\n(kubectl port-forward .*?)```", page, re.DOTALL)
    command = block.partition("\n")[2].replace("http://localhost:8000", engine.url).replace("team-a", namespace)
    path = f"{binary('kubectl').parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig)}
    shell = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(shell.stdout)["object"] == "list"
    without = re.sub(r" -H .*", "", command)
    shell = subprocess.run(["bash", "-c", without], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(shell.stdout)["error"]["code"] == "caller_refused"
