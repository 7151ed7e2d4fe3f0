"""Tests the steps of docs/keys.md: with a key, and with the token of a pod's ServiceAccount."""

import asyncio
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post

from conveyor_kubectl.command import main
from e2e.cluster.api import Api
from e2e.cluster.paths import REPOSITORY

Json = dict[str, Any]
OK = answering(web.Response, text='{"object": "text_completion"}', content_type="application/json")
PAGE = (REPOSITORY / "docs/keys.md").read_text()


def read_blocks(section: str) -> list[str]:
    """Return the blocks of a section of the page, without their indentation."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [re.sub("^   ", "", block, flags=re.MULTILINE) for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL)]


@pytest.fixture
async def served(stack: Stack) -> AsyncIterator[Stack]:
    """A service with an engine. It ends before another test uses the gateway."""
    async with running_engine(OK) as engine:
        await stack.add_engine(engine.port)
        yield stack
    await asyncio.to_thread(stack.cluster.delete_service, "qwen")
    await stack.wait(lambda: stack.gateway.demand(stack.key) is None)


async def apply_access(stack: Stack, access: Json) -> None:
    await stack.apply_service(access=access)


async def test_the_page_s_steps_work(
    gateway: GatewayProcess, served: Stack, kubeconfig: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, create, curl = read_blocks("Let a service ask for a key")
    await apply_access(served, yaml.safe_load(manifest)["spec"]["access"])
    namespace = served.cluster.namespace
    flags = shlex.split(create.replace("team-a", namespace))
    assert flags[:2] == ["kubectl", "conveyor"]
    assert await asyncio.to_thread(main, [*flags[2:], f"--kubeconfig={kubeconfig}"]) == 0
    key = capsys.readouterr().out.strip()
    command = curl.replace("http://conveyor-gateway.conveyor-system", gateway.url).replace("team-a", namespace)

    def call(key: str) -> Json:
        environment = {**os.environ, "KEY": key}
        done = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=60, env=environment)
        answer: Json = json.loads(done.stdout)
        return answer

    await served.wait(lambda: call(key).get("object") == "text_completion")
    answer = await asyncio.to_thread(call, key[:-1] + ("0" if key[-1] != "0" else "1"))
    assert answer["error"]["code"] == "invalid_api_key"


def request_token(api: Api, namespace: str, name: str, audience: str, seconds: int) -> str:
    """Return a token as the kubelet requests it for a projected volume."""
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
    spec = {"audiences": [audience], "expirationSeconds": seconds}
    answer = api.create(path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec})
    token: str = answer["status"]["token"]
    return token


async def test_the_page_s_pod_uses_the_service(served: Stack, crd: Api, http: aiohttp.ClientSession) -> None:
    namespace = served.cluster.namespace
    access, pod = (yaml.safe_load(block.replace("apps", namespace)) for block in read_blocks("Pods without a key"))
    for name in ("web", "other"):
        body = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
        crd.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", body)
    crd.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All&fieldValidation=Strict", pod)
    (source,) = pod["spec"]["volumes"][0]["projected"]["sources"]
    wanted = source["serviceAccountToken"]
    account, seconds = pod["spec"]["serviceAccountName"], wanted["expirationSeconds"]
    await apply_access(served, access["spec"]["access"])

    async def send(name: str, audience: str) -> tuple[int, str]:
        token = await asyncio.to_thread(request_token, crd, namespace, name, audience, seconds)
        status, body, _ = await post(http, served.completions, Authorization=f"Bearer {token}")
        return status, body.get("error", {}).get("message", "")

    began = time.monotonic()
    while (await send(account, wanted["audience"]))[0] == 503:  # the gateway has just started
        assert time.monotonic() - began < 30
        await asyncio.sleep(0.5)
    assert await send(account, wanted["audience"]) == (200, "")
    status, message = await send(account, "https://kubernetes.default.svc")
    assert (status, "Audience" in message) == (401, True)
    assert (await send("other", wanted["audience"]))[0] == 404
    assert f"client=system:serviceaccount:{namespace}:web" in "\n".join(served.gateway.log)


COMMANDS = (
    "kubectl conveyor key create NAME -o yaml > NAME.yaml",
    "kubectl conveyor key create NAME -n NAMESPACE -o yaml > NAME.yaml",
    "kubectl conveyor key create NAME",
    "kubectl conveyor key list -n NAMESPACE",
    "kubectl conveyor key rotate NAME --overlap=7d",
    "kubectl conveyor key revoke NAME",
)


def test_the_page_s_commands_for_teams_work(
    crd: Api, kubeconfig: Path, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in COMMANDS:
        words = shlex.split(command.partition(" > ")[0].replace("NAMESPACE", namespace).replace("NAME", "ci"))[2:]
        place = () if "-n" in words else ("-n", namespace)
        assert main([*words, *place, f"--kubeconfig={kubeconfig}"]) == 0, command
        assert command in PAGE
        capsys.readouterr()
