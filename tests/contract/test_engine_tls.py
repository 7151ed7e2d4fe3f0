"""Tests a real gateway and a real engine that serves TLS with a certificate of a self-made authority."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import cast

import aiohttp
import httpx
import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.listening.test_tls import Secret
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from e2e.cluster.api import Api
from e2e.cluster.certificates import Authority

BODY = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}


class TlsEngine(EngineServer):
    """An engine that serves TLS. The tests read its own pages without verifying it, as a kubelet does."""

    def __init__(self, folder: Path, model: Path, secret: Secret) -> None:
        super().__init__(folder, model, IDLE, host="0.0.0.0", max_num_seqs=8, tls_folder=secret.folder)
        self.client = httpx.Client(verify=False, timeout=60)

    @property
    def url(self) -> str:
        return super().url.replace("http://", "https://")

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", "ca")


@pytest.fixture
def secret(tmp_path: Path, authority: Authority, namespace: str) -> Secret:
    return Secret(tmp_path / "secret", authority, (f"*.{namespace}.svc",))


@pytest.fixture
def engine(tmp_path: Path, secret: Secret) -> Iterator[TlsEngine]:
    with TlsEngine(tmp_path / "engine", write_chat_model(tmp_path / "tiny"), secret) as started:
        started.wait_ready()
        yield cast(TlsEngine, started)


@pytest.fixture
def trusted(tmp_path: Path, authority: Authority) -> Path:
    """The file with the authorities that the gateway trusts."""
    file = tmp_path / "ca.crt"
    file.write_bytes(authority.certificate.read_bytes())
    return file


@pytest.fixture
async def stack(trusted: Path, engine: TlsEngine, kubeconfig: Path, crd: Api, namespace: str) -> AsyncIterator[Stack]:
    flags = ("--watch-namespaces", namespace, "--engine-authorities", str(trusted))
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, Cluster(crd, namespace))
        await stack.apply_service(queue={"timeout": "2s"})
        await stack.add_engine(engine.port)
        yield stack


async def test_no_stream_fails_while_engine_and_authorities_are_renewed(
    stack: Stack, engine: TlsEngine, secret: Secret, trusted: Path, tmp_path: Path, authority: Authority
) -> None:
    over, num_answers = asyncio.Event(), 0

    async def load(http: aiohttp.ClientSession) -> None:
        nonlocal num_answers
        while not over.is_set():
            async with http.post(stack.completions, json=BODY) as answer:
                body = await answer.read()
            assert (answer.status, body[-14:]) == (200, b"data: [DONE]\n\n"), body
            num_answers += 1

    other = Authority(tmp_path / "other", "ca")
    async with aiohttp.ClientSession() as http:
        clients = [asyncio.create_task(load(http)) for _ in range(4)]
        new = other.certificate.read_bytes()
        await asyncio.to_thread(trusted.write_bytes, authority.certificate.read_bytes() + new)
        await stack.wait(lambda: any("event=authorities_loaded" in line for line in stack.gateway.log))
        secret._authority = other
        secret.renew()
        await stack.wait(lambda: "event=certificate_loaded" in engine.log_path.read_text())
        await asyncio.to_thread(trusted.write_bytes, new)
        await stack.wait(lambda: sum("event=authorities_loaded" in line for line in stack.gateway.log) == 2)
        before = num_answers
        await stack.wait(lambda: num_answers > before + 4)
        over.set()
        await asyncio.gather(*clients)  # raises the first failure
        async with http.get(f"{stack.url}/v1/models") as answer:
            assert answer.status == 200


REASONS = {
    "authority": "unable to get local issuer certificate",
    "name": "Hostname mismatch",
    "expired": "certificate has expired",
}


@pytest.mark.parametrize("wrong", REASONS)
async def test_an_engine_with_a_wrong_certificate_gets_no_prompt_until_it_is_renewed(
    stack: Stack, engine: TlsEngine, secret: Secret, tmp_path: Path, wrong: str
) -> None:
    authority, names = secret._authority, secret._names
    if wrong == "authority":
        secret._authority = Authority(tmp_path / "stranger", "stranger")
    elif wrong == "name":
        secret._names = ("*.other-team.svc",)
    secret.renew(timedelta(seconds=-1 if wrong == "expired" else 3600))
    await stack.wait(lambda: "event=certificate_loaded" in engine.log_path.read_text())
    async with aiohttp.ClientSession() as http, http.post(stack.completions, json=BODY) as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["code"] == "queue_timeout"
    told = [line for line in stack.gateway.log if "event=retried" in line]
    assert REASONS[wrong] in told[-1]
    secret._authority, secret._names = authority, names
    secret.renew()
    await stack.wait(lambda: engine.log_path.read_text().count("event=certificate_loaded") == 2)
    async with aiohttp.ClientSession() as http, http.post(stack.completions, json=BODY) as answer:
        assert (answer.status, (await answer.read())[-14:]) == (200, b"data: [DONE]\n\n")
