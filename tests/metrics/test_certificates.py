"""Tests which clients pass the handshake and which get an answer, while certificates change on both sides."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from conveyor_kube.watch import WatchState
from conveyor_metrics.app import build_api_app
from conveyor_metrics.auth import Trust
from conveyor_metrics.certificates import Certificates, Serving
from conveyor_metrics.listener import Listener
from conveyor_metrics.source import GatewaySource
from e2e.cluster.certificates import Authority, KeyPair


class Server:
    """The API on its own port, with the certificates under test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.serving_authority = Authority(folder / "serving", "serving-authority")
        self.front_proxy_authority = Authority(folder / "front", "front-proxy-authority")
        self.certificates = Certificates(folder)
        self._change = asyncio.Event()
        self.listener: Listener | None = None

    def write_serving_certificate(self, authority: Authority | None = None) -> None:
        pair = (authority or self.serving_authority).issue("leaf", "metrics", names=["127.0.0.1"])
        shutil.copy(pair.certificate, self.folder / "tls.crt")
        shutil.copy(pair.key, self.folder / "tls.key")

    async def trust(self, *authorities: Authority) -> None:
        pem = "".join(authority.certificate.read_text() for authority in authorities)
        self.certificates.set_trust(Trust(pem, ("front-proxy-client",), ("X-Remote-User",)))
        await self.changed()

    async def serve(self, session: aiohttp.ClientSession) -> None:
        source = GatewaySource(session, 1, WatchState("endpointslices"))
        self.listener = Listener("127.0.0.1", 0, lambda trust: build_api_app(source, trust))
        await self.listener.serve(self._counted())

    async def changed(self) -> None:
        """Return when the next change is in use."""
        self._change.clear()
        async with asyncio.timeout(120):
            await self._change.wait()

    @property
    def url(self) -> str:
        assert self.listener is not None
        return f"https://127.0.0.1:{self.listener.port}/apis"

    async def query(self, pair: KeyPair | None, user: str = "hpa", authority: Authority | None = None) -> int:
        """Return the HTTP status for a client on a new connection.

        Raises aiohttp.ClientError if the handshake fails.
        """
        context = build_client_context(authority or self.serving_authority, pair)
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url, ssl=context, headers={"X-Remote-User": user}) as response,
        ):
            return response.status

    async def _counted(self) -> AsyncIterator[Serving]:
        async for serving in self.certificates.follow():
            yield serving
            self._change.set()


def build_client_context(authority: Authority, pair: KeyPair | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # as Go
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    made.write_serving_certificate()
    async with aiohttp.ClientSession() as session:
        serving = asyncio.create_task(made.serve(session))
        await made.trust(made.front_proxy_authority)
        yield made
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def test_the_front_proxy_is_answered(server: Server) -> None:
    pair = server.front_proxy_authority.issue("proxy", "front-proxy-client")
    assert await server.query(pair) == 200


async def test_a_caller_without_a_certificate_gets_401(server: Server) -> None:
    assert await server.query(None) == 401


async def test_another_name_under_the_front_proxy_authority_gets_401(server: Server) -> None:
    assert await server.query(server.front_proxy_authority.issue("other", "somebody")) == 401


async def test_the_front_proxy_without_a_user_gets_401(server: Server) -> None:
    pair = server.front_proxy_authority.issue("proxy", "front-proxy-client")
    assert await server.query(pair, user="") == 401


async def test_a_foreign_certificate_is_refused_in_the_handshake_even_with_the_right_name(
    server: Server, tmp_path: Path
) -> None:
    foreign = Authority(tmp_path / "foreign", "front-proxy-authority")
    with pytest.raises(aiohttp.ClientError):
        await server.query(foreign.issue("proxy", "front-proxy-client"))


async def test_a_certificate_of_the_serving_authority_is_no_front_proxy(server: Server) -> None:
    with pytest.raises(aiohttp.ClientError):
        await server.query(server.serving_authority.issue("proxy", "front-proxy-client"))


async def test_a_rotated_front_proxy_authority_is_trusted_and_the_old_one_is_not(
    server: Server, tmp_path: Path
) -> None:
    new = Authority(tmp_path / "new", "new-front-proxy-authority")
    old_pair = server.front_proxy_authority.issue("proxy", "front-proxy-client")
    new_pair = new.issue("proxy", "front-proxy-client")
    await server.trust(server.front_proxy_authority, new)
    assert [await server.query(old_pair), await server.query(new_pair)] == [200, 200]
    await server.trust(new)
    assert await server.query(new_pair) == 200
    with pytest.raises(aiohttp.ClientError):
        await server.query(old_pair)


async def test_an_open_connection_does_not_outlive_the_authority_that_it_rests_on(
    server: Server, tmp_path: Path
) -> None:
    pair = server.front_proxy_authority.issue("proxy", "front-proxy-client")
    context = build_client_context(server.serving_authority, pair)
    headers = {"X-Remote-User": "hpa"}
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            async with session.get(server.url, ssl=context, headers=headers) as response:
                assert response.status == 200
        await server.trust(Authority(tmp_path / "new", "new-front-proxy-authority"))
        with pytest.raises(aiohttp.ClientError):
            await session.get(server.url, ssl=context, headers=headers)


async def test_a_new_serving_certificate_is_served_within_seconds(server: Server, tmp_path: Path) -> None:
    pair = server.front_proxy_authority.issue("proxy", "front-proxy-client")
    new = Authority(tmp_path / "new-serving", "new-serving-authority")
    server.write_serving_certificate(new)
    await server.changed()
    assert await server.query(pair, authority=new) == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await server.query(pair)


@pytest.mark.parametrize("damage", ["key of another certificate", "empty certificate", "no certificate"])
async def test_files_that_cannot_be_loaded_leave_the_old_certificate_in_use(
    server: Server, tmp_path: Path, damage: str
) -> None:
    if damage == "key of another certificate":
        other = Authority(tmp_path / "other", "other").issue("leaf", "metrics", names=["127.0.0.1"])
        shutil.copy(other.key, tmp_path / "tls.key")
    elif damage == "empty certificate":
        (tmp_path / "tls.crt").write_text("")
    else:
        (tmp_path / "tls.crt").write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
    new = Authority(tmp_path / "new", "new-front-proxy-authority")
    with pytest.raises(TimeoutError):  # the change of the authority waits for usable files
        async with asyncio.timeout(1.5):
            await server.trust(new)
    assert await server.query(server.front_proxy_authority.issue("proxy", "front-proxy-client")) == 200
    server.write_serving_certificate()
    await server.changed()
    assert await server.query(new.issue("proxy", "front-proxy-client")) == 200


async def test_the_port_stays_closed_until_both_sides_are_there(tmp_path: Path) -> None:
    server = Server(tmp_path)
    (tmp_path / "tls.crt").touch()
    (tmp_path / "tls.key").touch()
    async with aiohttp.ClientSession() as session:
        serving = asyncio.create_task(server.serve(session))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await server.trust(server.front_proxy_authority)
        assert server.listener is not None
        assert server.listener.port is None
        server.write_serving_certificate()
        await server.changed()
        assert await server.query(None) == 401
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
