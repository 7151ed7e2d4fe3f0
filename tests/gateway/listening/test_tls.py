"""Tests a public port that serves TLS with the certificate of a mounted Secret, which is renewed while it serves."""

import asyncio
import contextlib
import ssl
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import begin_stream, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_process.serving_certificate import ServingCertificate
from conveyor_process.settings import SettingsError
from e2e.cluster.certificates import Authority

NAMES = ("127.0.0.1", "conveyor-gateway.conveyor-system.svc")


class Secret:
    """A folder like that of a mounted Secret: the kubelet replaces all its files at once, by a symbolic link."""

    def __init__(self, folder: Path, authority: Authority, names: Sequence[str] = NAMES) -> None:
        self.folder = folder
        self._names = names
        self._authority = authority
        self._number = 0
        folder.mkdir()
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(Path("..data") / name)
        self.renew()

    def renew(self, lifetime: timedelta = timedelta(days=90)) -> bytes:
        """Issue a new certificate and return it."""
        self._number += 1
        pair = self._authority.issue(f"gateway-{self._number}", "gateway", names=self._names, lifetime=lifetime)
        self.write(pair.certificate.read_bytes(), pair.key.read_bytes())
        return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())

    def write(self, chain: bytes, key: bytes) -> None:
        self._number += 1
        content, link = self.folder / f"..{self._number}", self.folder / "..data_tmp"
        content.mkdir()
        (content / "tls.crt").write_bytes(chain)
        (content / "tls.key").write_bytes(key)
        link.symlink_to(content.name)
        link.rename(self.folder / "..data")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority", "ca")


@pytest.fixture
def secret(tmp_path: Path, authority: Authority) -> Secret:
    return Secret(tmp_path / "secret", authority)


@pytest.fixture
def trust(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.certificate)


@pytest.fixture
def gateway(cluster: Cluster, kubeconfig: Path, secret: Secret) -> Iterator[GatewayProcess]:
    flags = ("--watch-namespaces", cluster.namespace, "--tls-folder", str(secret.folder))
    with GatewayProcess(kubeconfig, *flags) as started:
        yield started


async def find_certificate(gateway: GatewayProcess, trust: ssl.SSLContext) -> bytes:
    """Return the certificate of a new connection."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, ssl=trust)
    tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
    writer.close()
    found = tls.getpeercert(binary_form=True)
    assert found is not None
    return found


async def test_no_request_fails_while_the_certificate_is_renewed(
    gateway: GatewayProcess, cluster: Cluster, secret: Secret, trust: ssl.SSLContext
) -> None:
    stack, over = Stack(gateway, cluster), asyncio.Event()
    url = f"https://127.0.0.1:{gateway.port}/{stack.key}/v1/completions"
    num_answers = 0

    async def talk(request: web.Request) -> web.StreamResponse:
        return await begin_stream(request, b"data: 1\n\n", b"data: [DONE]\n\n")

    async def load(http: aiohttp.ClientSession, *, reconnects: bool) -> None:
        nonlocal num_answers
        while not over.is_set():
            async with http.post(url, data=b"{}", headers={"Connection": "close"} if reconnects else {}) as answer:
                assert (answer.status, await answer.read()) == (200, b"data: 1\n\ndata: [DONE]\n\n")
                num_answers += 1

    await stack.apply_service()
    async with running_engine(talk) as engine, aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust)) as http:
        await stack.add_engine(engine.port)
        clients = [asyncio.create_task(load(http, reconnects=number % 2 == 0)) for number in range(4)]
        for _ in range(3):
            renewed, before = secret.renew(), num_answers
            await stack.wait(lambda: any(f"file={secret.folder}" in line for line in gateway.log))
            await wait_for_certificate(gateway, trust, renewed)
            assert num_answers > before
        over.set()
        await asyncio.gather(*clients)  # raises the first failure


async def wait_for_certificate(gateway: GatewayProcess, trust: ssl.SSLContext, wanted: bytes) -> None:
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(ssl.SSLCertVerificationError):  # the present one has expired
                if await find_certificate(gateway, trust) == wanted:
                    return
            await asyncio.sleep(0.1)


async def test_a_certificate_that_has_expired_is_replaced_without_a_restart(
    gateway: GatewayProcess, secret: Secret, trust: ssl.SSLContext
) -> None:
    await wait_for_certificate(gateway, trust, secret.renew(timedelta(seconds=8)))
    connector = aiohttp.TCPConnector(ssl=trust)
    async with aiohttp.ClientSession(f"https://127.0.0.1:{gateway.port}", connector=connector) as http:
        async with http.get("/") as before:
            await before.read()
        await asyncio.sleep(9)
        with pytest.raises(ssl.SSLCertVerificationError, match="certificate has expired"):
            await find_certificate(gateway, trust)
        async with http.get("/") as after:  # on the open connection
            assert after.status == before.status
    assert gateway.admin("/readyz")[0] == 200
    await wait_for_certificate(gateway, trust, secret.renew())


async def test_files_that_cannot_be_loaded_leave_the_last_certificate(
    gateway: GatewayProcess, secret: Secret, trust: ssl.SSLContext
) -> None:
    before = await find_certificate(gateway, trust)
    pair = secret._authority.issue("other", "other")
    chain = (secret.folder / "tls.crt").read_bytes()
    for wrong in ((chain, pair.key.read_bytes()), (b"no certificate", b"")):
        count = len(gateway.log)
        secret.write(*wrong)
        async with asyncio.timeout(20):
            while not any("event=certificate_refused" in line for line in gateway.log[count:]):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert await find_certificate(gateway, trust) == before


async def test_a_client_that_does_not_know_the_authority_refuses_the_port(gateway: GatewayProcess) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="unable to get local issuer certificate"):
            await http.get(f"https://127.0.0.1:{gateway.port}/v1/models")
        with pytest.raises(aiohttp.ClientError):
            await http.get(f"http://127.0.0.1:{gateway.port}/v1/models")


async def test_the_gateway_sees_that_its_own_port_answers(gateway: GatewayProcess) -> None:
    await asyncio.sleep(4)  # three checks, each of which would fail without TLS
    assert gateway.admin("/readyz")[0] == 200


def test_a_program_without_a_certificate_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot serve with .*tls\.crt and .*tls\.key: .*No such file"):
        ServingCertificate(tmp_path)
