"""Gets one file by HTTPS from an address that the caller has checked, within limits. Used by `media`.

The server is not trusted: the bytes of its head, of its body and of the framing around the body are limited. The caller
limits the time.
"""

import asyncio
import base64
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

import httptools

HTTPS_PORT: Final = 443
_PIECE_BYTES: Final = 64 * 2**10
_HEAD_BYTES_MAX: Final = 64 * 2**10  # of the head and of a body's framing, which may have an eighth of the body more
_PROXY_HEAD_BYTES_MAX: Final = 8 * 2**10
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})


class GetFailed(Exception):
    """The file cannot be had. The message completes "HOST ..."."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file is."""

    host: str
    port: int
    path: str  # with the query, and a slash at the beginning

    @property
    def authority(self) -> str:
        """The host, with its port if it is not 443."""
        return self.host if self.port == HTTPS_PORT else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Redirect:
    """The answer names another place."""

    location: str


class _Answer:
    """Collects an answer. The parser calls the methods `on_...`."""

    def __init__(self, take: Callable[[int], None]) -> None:
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._read_bytes = 0
        self._has_head = False
        self.body = bytearray()
        self.status = 0
        self.is_complete = False

    def feed(self, data: bytes) -> None:
        """Parse a piece. Raises GetFailed."""
        self._read_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise (error.__context__ or error) from None  # what a method below has raised
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self.is_complete:  # what follows the answer does not matter
                raise GetFailed("sends an answer that is not HTTP") from None
        if self._read_bytes - len(self.body) > _HEAD_BYTES_MAX + len(self.body) // 8:
            raise GetFailed("sends too much around its answer")

    def end(self) -> None:
        """Check that nothing is missing, after the server has closed the connection. Raises GetFailed."""
        is_framed = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        if not self.is_complete and (is_framed or not self._has_head):
            raise GetFailed("closes the connection before its answer is complete")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.is_complete:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others only come before the answer
        if not self._has_head:
            self._headers.clear()

    def on_body(self, data: bytes) -> None:
        if self.status == 200 and not self.is_complete:
            self._take(len(data))
            self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = self._has_head  # a second answer may follow, which is ignored

    @property
    def is_enough(self) -> bool:
        """Whether nothing more has to be read: an error's body is not."""
        return self.is_complete or (self._has_head and self.status != 200)

    def result(self) -> bytes | Redirect:
        """Return the body, or where it is. Raises GetFailed."""
        location = self._headers.get(b"location", b"").decode("latin-1")
        if self.status in _REDIRECTS and location:
            return Redirect(location)
        if self.status != 200:
            raise GetFailed(f"answers with status {self.status}")
        return bytes(self.body)


async def get(
    place: Place, addresses: Sequence[str], proxy: str | None, tls: ssl.SSLContext, take: Callable[[int], None]
) -> bytes | Redirect:
    """Return the file, or the place to which the server redirects. Raises GetFailed or OSError.

    addresses: of the host, or of the proxy if there is one. They are tried in order.
    take: called with the number of bytes of each piece. May raise GetFailed.
    """
    request = (
        f"GET {place.path} HTTP/1.1\r\nHost: {place.authority}\r\nUser-Agent: conveyor\r\n"
        "Accept: image/png, image/jpeg, image/webp, image/gif\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
    )
    answer = _Answer(take)
    async with _connect(place, addresses, proxy, tls) as (reader, writer):
        writer.write(request.encode())
        while not answer.is_enough:
            if not (data := await reader.read(_PIECE_BYTES)):
                answer.end()
                break
            answer.feed(data)
    return answer.result()


@asynccontextmanager
async def _connect(
    place: Place, addresses: Sequence[str], proxy: str | None, tls: ssl.SSLContext
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = place.port if proxy is None else proxy_place(proxy)[1]
    opened = await _open(addresses, port)
    try:
        if proxy is not None:
            await _pass_proxy(opened, place, proxy)
        reader, writer = await asyncio.open_connection(sock=opened, ssl=tls, server_hostname=place.host)
    except BaseException:
        opened.close()
        raise
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # without waiting for the server


async def _open(addresses: Sequence[str], port: int) -> socket.socket:
    """Return a connection to the first address that accepts one. Raises OSError."""
    failure = OSError("no address")
    for address in addresses:
        opened = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
        try:
            opened.setblocking(False)
            await asyncio.get_running_loop().sock_connect(opened, (address, port))
        except OSError as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
        else:
            return opened
    raise failure


def proxy_place(proxy: str) -> tuple[str, int]:
    """Return host and port of a proxy's URL. Raises GetFailed."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(proxy)
        if parts.scheme == "http" and parts.hostname:
            return parts.hostname, parts.port or 80
    raise GetFailed("cannot be reached, because this server's proxy is not an http:// URL")


async def _pass_proxy(opened: socket.socket, place: Place, proxy: str) -> None:
    """Let the proxy connect to the place. Raises GetFailed or OSError."""
    target, parts = f"{place.host}:{place.port}", urlsplit(proxy)
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}")
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(opened, ("\r\n".join(lines) + "\r\n\r\n").encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):  # nothing follows, as the client speaks first in TLS
        data = await loop.sock_recv(opened, _PROXY_HEAD_BYTES_MAX)
        head += data
        if not data or len(head) > _PROXY_HEAD_BYTES_MAX:
            raise GetFailed("cannot be reached, because this server's proxy gives no answer")
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if len(status) < 2 or status[1] != b"200":
        code = status[1][:3].decode("latin-1") if len(status) > 1 else "?"
        raise GetFailed(f"cannot be reached, because this server's proxy answers with status {code}")
