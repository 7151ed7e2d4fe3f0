"""Tests downloads through a company's proxy, which sees the name of the source and nothing else."""

import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.engine.fetching.buckets import URI, Server
from tests.engine.fetching.hubs import WEIGHTS, Fetch

from conveyor_engine.fetching.fetch import fetch
from e2e.cluster.certificates import Authority
from e2e.hub.server import Hub


class _Proxy(socketserver.ThreadingTCPServer):
    """A proxy for TLS: it connects to the target of each CONNECT, and passes on what both sides send."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Tunnel(socketserver.StreamRequestHandler):
    server: _Proxy

    def handle(self) -> None:
        method, target, _ = self.rfile.readline().decode().split()
        while self.rfile.readline().strip():
            pass
        self.server.requests.append(f"{method} {target}")
        host, _, port = target.rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pass_on, args=(there, self.connection))
            back.start()
            _pass_on(self.connection, there)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Proxy]:
    """A proxy that is named as in the page's profile: `HTTPS_PROXY`, without exceptions."""
    for name in ("https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with _Proxy() as started:
        monkeypatch.setenv("HTTPS_PROXY", started.url)
        thread = threading.Thread(target=started.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """TLS for a server on this machine, of an authority that `SSL_CERT_FILE` names."""
    authority = Authority(tmp_path / "authority", "authority")
    pair = authority.issue("source", "source", names=["127.0.0.1"])
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(pair.certificate, pair.key)
    return made


def test_a_hub_is_read_through_the_proxy(
    proxy: _Proxy, context: ssl.SSLContext, hub: Hub, fetch_from: Fetch, target: Path
) -> None:
    hub.socket = context.wrap_socket(hub.socket, server_side=True)
    url = hub.url.replace("http:", "https:")
    fetch_from(url, "hf://org/tiny", target)
    assert (target / WEIGHTS).exists()
    assert set(proxy.requests) == {url.replace("https://", "CONNECT ")}


def test_a_bucket_is_read_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, proxy: _Proxy, context: ssl.SSLContext, server: Server, target: Path
) -> None:
    server.encrypt(context)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    fetch(URI, str(target))
    assert (target / WEIGHTS).exists()
    assert set(proxy.requests) == {server.url.replace("https://", "CONNECT ")}
