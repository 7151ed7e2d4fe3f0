import asyncio
import gc
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conveyor_process import listening
from conveyor_process.listening import Acceptor, allow_open_files, close_port, listen, name_peer
from e2e.cluster.certificates import Authority


def test_the_process_may_open_as_many_files_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    try:
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("host", "peer"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
    ],
)
def test_a_peer_is_an_ipv4_address_or_an_ipv6_network(host: str, peer: str) -> None:
    assert name_peer(host) == peer


@contextmanager
def listening_with_tls(tmp_path: Path) -> Iterator[tuple[Acceptor, ssl.SSLContext]]:
    """Open a port with TLS. Yields it and the authority that its clients trust."""
    authority = Authority(tmp_path, "authority")
    pair = authority.issue("server", "server", names=["localhost"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    acceptor = Acceptor(listen("127.0.0.1", 0), asyncio.Protocol, ssl=context, ssl_handshake_timeout=1000)
    yield acceptor, ssl.create_default_context(cafile=str(authority.certificate))


async def wait_closed(clients: list[socket.socket]) -> None:
    for client in clients:
        client.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


async def test_clients_that_begin_no_tls_hold_few_handshakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would hold buffers of 256 KiB until the timeout, and there may be as many clients as descriptors."""
    monkeypatch.setattr(listening, "MAX_HANDSHAKES", 4)
    with listening_with_tls(tmp_path) as (acceptor, trusting):
        silent = [socket.create_connection(("127.0.0.1", acceptor.port)) for _ in range(12)]
        await wait_closed(silent[:8])
        for client in silent[8:]:
            with pytest.raises(BlockingIOError):
                client.recv(1, socket.MSG_DONTWAIT)
        _, writer = await asyncio.open_connection("127.0.0.1", acceptor.port, ssl=trusting, server_hostname="localhost")
        writer.close()
        for client in silent:
            client.close()
        await close_port(acceptor)


async def test_a_handshake_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its buffers wait for a garbage collection, which depends on the number of objects, not their size."""
    monkeypatch.setattr(listening, "MAX_HANDSHAKES", 1)
    gc.collect()
    gc.disable()
    try:
        with listening_with_tls(tmp_path) as (acceptor, _):
            silent = [socket.create_connection(("127.0.0.1", acceptor.port)) for _ in range(32)]
            await wait_closed(silent[:-1])
            for _ in range(300):  # the last ones are on their way
                left = sum(type(each) is SSLProtocol for each in gc.get_objects())
                if left <= 4:
                    break
                await asyncio.sleep(0.01)
            for client in silent:
                client.close()
            await close_port(acceptor)
    finally:
        gc.enable()
    assert left <= 4
