"""Fetches the images that requests name by URL, from hosts that the setting `media_hosts` lists.

Runs in the API process between two passes of a worker, so that a slow host holds no worker
(docs/adr/0192-images-are-fetched-between-two-passes.md). Clients choose URLs, and hosts choose addresses, answers and
their speed. So a URL is fetched only from a listed host, at an address that is public, which is resolved once and then
used. Redirects are checked in the same way. Bytes, time and the number of fetches are limited.
"""

import asyncio
import ipaddress
import logging
import os
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import urljoin

from conveyor_engine.errors import InvalidRequest, Overloaded
from conveyor_engine.serving.https_get import HTTPS_PORT, GetFailed, Place, Redirect, get, proxy_place
from conveyor_process.proxies import find_proxy

BYTES_MAX: Final = 24 * 2**20  # of all files of a request; as base64 they would fill the largest body
SECONDS_MAX: Final = 10.0  # for all files of a request
FETCHES_MAX: Final = 16  # at a time
FETCHES_EACH: Final = 4  # of one request
REDIRECTS_MAX: Final = 3
_ADDRESSES_MAX: Final = 4  # of a host, that are tried
_URL_CHARACTERS_MAX: Final = 8192
_URL: Final = re.compile(r"https://([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)(?::([0-9]{1,5}))?(?![^/?#])([!-~]*)", re.I | re.A)
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_PLATFORM: Final = ipaddress.ip_address("168.63.129.16")  # Azure's services for machines, at a public address
_log = logging.getLogger(__name__)
Resolve = Callable[[str, int], Awaitable[list[str]]]


class MediaFetcher:
    """Fetches files for all requests of this engine."""

    def __init__(
        self,
        hosts: Sequence[str],
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] | None = None,
        seconds_max: float = SECONDS_MAX,
    ) -> None:
        """resolve: returns the addresses of a host and port; the default asks the system.

        is_allowed: whether the engine may connect to an address; the default is `is_public`.
        """
        self._hosts = frozenset(host.removesuffix(f":{HTTPS_PORT}") for host in hosts)
        self._resolvers = ThreadPoolExecutor(FETCHES_MAX, "resolve")  # has no threads before the first call
        self._resolve = resolve or self._ask_system
        self._is_allowed = is_allowed or is_public
        self._seconds_max = seconds_max
        self._free = asyncio.Semaphore(FETCHES_MAX)
        self._tls: ssl.SSLContext | None = None  # loaded with the first fetch

    async def fetch(self, names: Mapping[str, str], grow: Callable[[int], None]) -> dict[str, bytes]:
        """Return the files of URLs. Raises InvalidRequest, or Overloaded if other fetches leave no room.

        names: what errors call the files, by URL. grow: called with the number of bytes that are kept.
        """
        places = {url: self._check(url, name) for url, name in names.items()}
        budget, each = _Budget(grow), asyncio.Semaphore(FETCHES_EACH)
        begun: list[str] = []
        found: dict[str, bytes] = {}

        async def fetch(url: str) -> None:
            async with each, self._free:
                begun.append(url)
                found[url] = await self._fetch_one(places[url], names[url], budget)

        try:
            async with asyncio.timeout(self._seconds_max), asyncio.TaskGroup() as group:
                for url in names:
                    group.create_task(fetch(url))
        except TimeoutError:
            late = [f"{names[url]} did not arrive from {places[url].host}" for url in begun if url not in found]
            if not late:
                raise Overloaded("this engine fetches as many images as it may at a time; try again") from None
            raise InvalidRequest(f"{late[0]} within {self._seconds_max:g} s", param="messages") from None
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        return found

    def _check(self, url: str, name: str) -> Place:
        """Return the place of a URL, if it may be fetched. Raises InvalidRequest."""
        if not self._hosts:
            raise InvalidRequest(
                f"{name} is a URL, and this server fetches none, because its setting `media_hosts` "
                "(`engine.mediaHosts` of the service) is empty: send the image itself, in base64 or as a data: URI",
                param="messages",
            )
        match = _URL.fullmatch(url.strip()) if len(url) <= _URL_CHARACTERS_MAX else None
        if match is None or int(match[2] or HTTPS_PORT) not in range(1, 65536):
            raise InvalidRequest(
                f"{name} is a URL that this server does not fetch: it must be https://HOST/PATH, in ASCII, without a "
                f"user, and with at most {_URL_CHARACTERS_MAX} characters",
                param="messages",
            )
        path = match[3].partition("#")[0]
        place = Place(match[1].lower(), int(match[2] or HTTPS_PORT), path if path.startswith("/") else f"/{path}")
        if place.authority not in self._hosts:
            raise InvalidRequest(
                f"{name} is a URL of {place.authority[:300]}, which this server's setting `media_hosts` "
                "(`engine.mediaHosts` of the service) does not list: send the image itself, in base64 or as a data: "
                "URI",
                param="messages",
            )
        return place

    async def _fetch_one(self, place: Place, name: str, budget: "_Budget") -> bytes:
        for _ in range(REDIRECTS_MAX + 1):
            found = await self._get(place, name, budget)
            if isinstance(found, bytes):
                return found
            place = self._check(
                urljoin(f"https://{place.authority}{place.path}", found.location), f"{name} redirects: it"
            )
        raise InvalidRequest(f"{name} is redirected more than {REDIRECTS_MAX} times", param="messages")

    async def _get(self, place: Place, name: str, budget: "_Budget") -> bytes | Redirect:
        try:
            proxy = find_proxy(f"https://{place.authority}{place.path}")
            addresses = await self._find_addresses(place, proxy)
            return await get(place, addresses, proxy, self._load_authorities(), budget.take)
        except GetFailed as error:
            problem = str(error)
        except ssl.SSLCertVerificationError as error:
            problem = f"has a certificate that this server does not trust: {error.verify_message}"
        except socket.gaierror:
            problem = "has no address"
        except OSError as error:
            problem = f"cannot be reached: {error.strerror or type(error).__name__}"
        raise InvalidRequest(f"{name} cannot be fetched: {place.host} {problem}", param="messages")

    async def _find_addresses(self, place: Place, proxy: str | None) -> list[str]:
        """Return the addresses to connect to: those of the proxy, if there is one. Raises GetFailed or OSError."""
        if proxy is not None:  # the proxy resolves the host, and decides where it connects to
            return (await self._resolve(*proxy_place(proxy)))[:_ADDRESSES_MAX]
        addresses = await self._resolve(place.host, place.port)
        if refused := [address for address in addresses if not self._is_allowed(address)]:
            _log.warning("event=media_address_refused host=%s address=%s", place.host, refused[0])
            raise GetFailed("has an address that is not public")
        return addresses[:_ADDRESSES_MAX]

    async def _ask_system(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._resolvers, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]

    def _load_authorities(self) -> ssl.SSLContext:
        """Return a context that trusts SSL_CERT_FILE, as downloads of models do, or else the system's authorities."""
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or None)
        return self._tls


class _Budget:
    """The bytes that the files of one request may have together."""

    def __init__(self, grow: Callable[[int], None]) -> None:
        self._grow = grow
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count the bytes of a piece. Raises GetFailed."""
        if self._num_bytes + num_bytes > BYTES_MAX:
            raise GetFailed(f"sends too much: the images of a request may have {BYTES_MAX >> 20} MiB together")
        self._num_bytes += num_bytes
        self._grow(num_bytes)


def is_public(address: str) -> bool:
    """Return whether an address is one of the Internet, and of no network that only this machine or cluster reaches."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.sixtofour is not None or parsed.teredo is not None:
            return False
        if parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        elif parsed in _NAT64:
            parsed = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved and parsed != _PLATFORM
