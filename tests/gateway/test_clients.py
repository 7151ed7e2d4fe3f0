"""Tests whose share a request takes: the peer's, that of the last address that is no trusted proxy's, or a name's."""

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from conveyor_gateway import clients as clients_module
from conveyor_gateway.clients import MAX_FORWARDED, Client, Clients
from conveyor_gateway.settings import PROGRAM
from conveyor_process.arrivals import MAX_A_ROUND, Peer
from conveyor_process.settings import SettingsError

CLIENTS = Clients(PROGRAM.parse(["--trusted-proxies=10.0.0.0/8,fd00::/8"], {}).trusted_proxies)


def find(peer: str, *forwarded: str, clients: Clients = CLIENTS) -> str:
    headers = CIMultiDict(("X-Forwarded-For", each) for each in forwarded)
    return clients.find(make_mocked_request("POST", "/", headers=headers).clone(remote=peer)).id


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("192.0.2.1", ["198.51.100.7"], "192.0.2.1"),  # not trusted, whatever it writes
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["203.0.113.9, 198.51.100.7"], "198.51.100.7"),  # the first was written by the client
        ("10.0.0.1", ["198.51.100.7, 10.2.3.4"], "198.51.100.7"),
        ("10.0.0.1", ["198.51.100.7", "10.2.3.4"], "198.51.100.7"),
        ("10.0.0.1", ["10.9.9.9, 10.2.3.4"], "10.9.9.9"),
        ("10.0.0.1", ["198.51.100.7:4711"], "198.51.100.7"),
        ("10.0.0.1", ["[2001:db8:1:2:3:4:5:6]:4711"], "2001:db8:1:2::/64"),
        ("fd00::1", ["198.51.100.7, nonsense, 10.2.3.4"], "10.2.3.4"),
        ("::ffff:10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("2001:db8:1:2:3:4:5:6", [], "2001:db8:1:2::/64"),
        ("", [], ""),
    ],
)
def test_the_client_is_the_last_address_that_is_not_a_trusted_proxys(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert find(peer, *forwarded) == client


def test_only_the_last_addresses_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = list[str]()
    parse = clients_module._parse_address
    monkeypatch.setattr(clients_module, "_parse_address", lambda text: parsed.append(text) or parse(text))
    proxies = [f"10.1.{number // 256}.{number % 256}" for number in range(1000)]
    assert find("10.0.0.1", "198.51.100.7", ", ".join(proxies)) == proxies[-MAX_FORWARDED]
    assert len(parsed) <= MAX_FORWARDED + 1  # and the peer


def test_without_trusted_proxies_a_client_is_the_peer() -> None:
    assert find("10.0.0.1", "198.51.100.7", clients=Clients(())) == "10.0.0.1"


@pytest.mark.parametrize(
    ("peer", "names", "client"),
    [
        ("10.0.0.1", ["team-a"], Client("team-a", is_named=True)),
        ("10.0.0.1", ["forged", "team-a"], Client("team-a", is_named=True)),  # the proxy appended the last one
        ("192.0.2.1", ["team-a"], Client("192.0.2.1")),  # not trusted
        ("10.0.0.1", [], Client("198.51.100.7")),
        ("10.0.0.1", [""], Client("198.51.100.7")),
        ("10.0.0.1", ["a b"], Client("198.51.100.7")),
        ("10.0.0.1", ["x" * 129], Client("198.51.100.7")),
        ("10.0.0.1", ["\u00e9"], Client("198.51.100.7")),
    ],
)
def test_a_trusted_proxy_names_the_client_in_the_header_of_the_setting(
    peer: str, names: list[str], client: Client
) -> None:
    settings = PROGRAM.parse(["--trusted-proxies=10.0.0.0/8", "--client-header=x-client"], {})
    headers = CIMultiDict([("X-Forwarded-For", "198.51.100.7"), *(("X-Client", name) for name in names)])
    request = make_mocked_request("POST", "/", headers=headers).clone(remote=peer)
    assert Clients(settings.trusted_proxies, settings.client_header).find(request) == client
    assert not CLIENTS.find(request).is_named, "without the setting"


@pytest.mark.parametrize("name", ["team-a/ci", "system:serviceaccount:apps:web", "a/b/c", "/"])
def test_a_name_from_a_proxy_never_equals_that_of_a_key_or_an_account(name: str) -> None:
    clients = Clients(PROGRAM.parse(["--trusted-proxies=10.0.0.0/8"], {}).trusted_proxies, "X-Client")
    request = make_mocked_request("POST", "/", headers=CIMultiDict({"X-Client": name})).clone(remote="10.0.0.1")
    assert clients.find(request) == Client(f"proxy:{name}", is_named=True)


def test_a_header_without_trusted_proxies_is_refused() -> None:
    with pytest.raises(SettingsError, match="has no effect without `trusted_proxies`"):
        PROGRAM.parse(["--client-header=X-Client"], {})


def test_a_trusted_proxy_opens_connections_for_many_clients() -> None:
    """When a connection gets its turn, its requests are not read yet, so X-Forwarded-For is not known."""
    assert CLIENTS.find_peer("10.0.0.1") == Peer("10.0.0.1", MAX_A_ROUND)
    assert CLIENTS.find_peer("fd00::1") == Peer("fd00::1", MAX_A_ROUND)
    assert CLIENTS.find_peer("192.0.2.1") == Peer("192.0.2.1", 1)
    assert Clients(()).find_peer("10.0.0.1") == Peer("10.0.0.1", 1)
