"""A host of images on this machine, which answers well or in hostile ways by HTTPS, and a proxy before it."""

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.certificates import Authority

NAME = "images.example"
IMAGE = b"\x89PNG" + bytes(range(256)) * 300
_PIECE = bytes(16 * 1024)


def _chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(IMAGE)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
ANSWERS = {
    "/image": OK + LENGTH + IMAGE,
    "/chunked": OK + CHUNKED + _chunked(IMAGE, 4096),
    "/until-close": OK + b"\r\n" + IMAGE,
    "/hints": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + LENGTH + IMAGE,
    "/more-than-it-says": OK + LENGTH + IMAGE + _PIECE,
    "/less-than-it-says": OK + b"Content-Length: 999999\r\n\r\n" + IMAGE,
    "/cut": OK + CHUNKED + _chunked(IMAGE, 4096)[:-9],
    "/tiny-chunks": OK + CHUNKED + _chunked(IMAGE, 1),
    "/missing": b"HTTP/1.1 404 Not Found\r\n\r\n",
    "/no-http": b"SSH-2.0-x\r\n",
    "/nothing": b"",
    "/switch": b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
    "/moved": b"HTTP/1.1 302 Found\r\nLocation: image\r\n\r\n",
    "/moved-to-metadata": b"HTTP/1.1 302 Found\r\nLocation: https://169.254.169.254/latest\r\n\r\n",
    "/moved-to-http": b"HTTP/1.1 301 Moved\r\nLocation: http://images.example/image\r\n\r\n",
    "/moved-to-file": b"HTTP/1.1 301 Moved\r\nLocation: file:///etc/passwd\r\n\r\n",
    "/moved-forever": b"HTTP/1.1 307 Again\r\nLocation: /moved-forever\r\n\r\n",
    "/moved-nowhere": b"HTTP/1.1 307 Again\r\n\r\n",
}
ENDLESS = {"/endless": (OK + b"\r\n", _PIECE), "/endless-head": (OK, b"x: y\r\n" * 1000), "/stall": (OK, b"")}


class ImageHost:
    """The host's port, what it was asked for, and how much it has sent."""

    def __init__(self, folder: Path, name: str = NAME) -> None:
        self.authority = Authority(folder, "authority")
        pair = self.authority.issue("host", "host", names=[name])
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(pair.certificate, pair.key)
        self.requests: list[str] = []
        self.num_sent = 0
        self.num_open = self.most_open = 0
        self.is_over = threading.Event()
        self.port = 0
        self._lock = threading.Lock()

    def url(self, path: str) -> str:
        return f"https://{NAME}:{self.port}{path}"

    def handle(self, plain: socket.socket) -> None:
        """Answer one request."""
        with contextlib.suppress(OSError), self.tls.wrap_socket(plain, server_side=True) as connection:
            with self._lock:
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
            try:
                self._answer(connection)
            finally:
                with self._lock:
                    self.num_open -= 1

    def _answer(self, connection: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(4096)
        self.requests.append(head.decode())
        path = head.split(b" ")[1].decode().partition("?")[0]
        self._send(connection, ANSWERS.get(path, b""))
        if path in ENDLESS:
            first, piece = ENDLESS[path]
            self._send(connection, first)
            while not self.is_over.wait(0 if piece else 0.05):
                self._send(connection, piece)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.num_sent += len(data)


@contextmanager
def serving(handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection in a thread of its own; yields the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            handle(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@contextmanager
def image_host(folder: Path, name: str = NAME) -> Iterator[ImageHost]:
    """Serve the answers above. name: of its certificate."""
    host = ImageHost(folder, name)
    with serving(host.handle) as host.port:
        yield host
        host.is_over.set()


@contextmanager
def proxy(target: int, status: bytes = b"200 OK") -> Iterator[tuple[int, list[str]]]:
    """Serve CONNECT: each connection leads to the port `target`. Yields the port, and the heads of requests."""
    heads: list[str] = []

    def copy(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle(client: socket.socket) -> None:
        heads.append(client.recv(65536).decode())
        client.sendall(b"HTTP/1.1 " + status + b"\r\nVia: x\r\n\r\n")
        if status.startswith(b"200"):
            with socket.create_connection(("127.0.0.1", target)) as server:
                threading.Thread(target=copy, args=(server, client), daemon=True).start()
                copy(client, server)

    with serving(handle) as port:
        yield port, heads
