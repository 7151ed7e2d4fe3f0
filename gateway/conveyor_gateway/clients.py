"""Finds the client of a request. Each client has a share of the gateway's capacity.

Built by `server`, called by `listening`. The gateway does not authenticate clients, so a client is an address, usually
the peer's. Behind trusted proxies, the client is the last address in X-Forwarded-For that is not a trusted proxy's, or
the first of the last MAX_FORWARDED. Earlier addresses in this header cannot be trusted. A trusted proxy that has
checked a key or a login can instead name the client in a header of its own. Such a name never equals that of a caller
whose key or token the gateway has checked.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from aiohttp.web import BaseRequest

from conveyor_process.arrivals import MAX_A_ROUND, Peer
from conveyor_process.kinds import Network
from conveyor_process.listening import name_peer
from conveyor_tokens.verifier import ACCOUNT_PREFIX

MAX_FORWARDED: Final = 16  # addresses of X-Forwarded-For that are read, from the last one; each proxy appends one
_CLIENT_PREFIX_BITS: Final = 64  # an IPv6 client usually has a whole network with this prefix
_PROXY_PREFIX: Final = "proxy:"  # no namespace contains a colon
_NAME: Final = re.compile(r"[\x21-\x7e]{1,128}")  # can be logged unchanged


class Client(NamedTuple):
    """A client: its name if a proxy named it, otherwise its IPv4 address or IPv6 network; "" if it is unknown."""

    id: str
    is_named: bool = False


class Clients:
    """`trusted_proxies` are networks of proxies that append to X-Forwarded-For.

    name_header: the header in which these proxies name the client; empty if they do not.
    """

    def __init__(self, trusted_proxies: Sequence[Network], name_header: str = "") -> None:
        self._trusted_proxies = trusted_proxies
        self._name_header = name_header

    def find(self, request: BaseRequest) -> Client:
        """Return the request's client. A name that cannot be logged is ignored."""
        client, description = _find_peer(request.remote or "")
        if client is None or not self._is_trusted(client):
            return Client(description)
        names = request.headers.getall(self._name_header, ()) if self._name_header else ()
        if names and _NAME.fullmatch(names[-1]):  # a proxy that appends writes the last one
            return Client(_keep_apart(names[-1]), is_named=True)
        return Client(self._find_address(request, client))

    def _find_address(self, request: BaseRequest, client: IPv4Address | IPv6Address) -> str:
        forwarded = ",".join(request.headers.getall("X-Forwarded-For", ()))
        for text in reversed(forwarded.rsplit(",", MAX_FORWARDED)[-MAX_FORWARDED:]):
            address = _parse_address(text)
            if address is None:
                break
            client = address
            if not self._is_trusted(client):
                break
        return _describe(client)

    def find_peer(self, host: str) -> Peer:
        """Return the peer for which a new connection from `host` is counted.

        A trusted proxy carries many clients' connections, so more of its connections are accepted in each round.
        """
        if self._trusted_proxies and (address := _parse_address(host)) is not None and self._is_trusted(address):
            return Peer(host, MAX_A_ROUND)
        return Peer(name_peer(host))

    def _is_trusted(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._trusted_proxies)


def _keep_apart(name: str) -> str:
    """Return a proxy's name for a client, with a prefix if it has the form of a caller's name."""
    return f"{_PROXY_PREFIX}{name}" if "/" in name or name.startswith(ACCOUNT_PREFIX) else name


def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address as proxies write it, with or without a port and brackets. Return None if it is invalid."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def _describe(address: IPv4Address | IPv6Address | None) -> str:
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, _CLIENT_PREFIX_BITS), strict=False))
    return "" if address is None else str(address)


@lru_cache(1024)
def _find_peer(address: str) -> tuple[IPv4Address | IPv6Address | None, str]:
    peer = _parse_address(address)
    return peer, _describe(peer)
