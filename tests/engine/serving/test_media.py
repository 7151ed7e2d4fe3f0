"""Tests what is fetched for requests, from where, and what slow and hostile hosts can do."""

import asyncio
import base64
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.image_host import IMAGE, NAME, ImageHost, image_host, proxy

from conveyor_engine.errors import InvalidRequest, Overloaded, RequestError
from conveyor_engine.serving import media
from conveyor_engine.serving.media import MediaFetcher, is_public

VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageHost]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with image_host(tmp_path / "host") as host:
        monkeypatch.setenv("SSL_CERT_FILE", str(host.authority.certificate))
        yield host


async def here(_: str, __: int) -> list[str]:
    return ["127.0.0.1"]


def fetcher(host: ImageHost, *hosts: str, **options: Any) -> MediaFetcher:
    """Return one that may connect to this machine."""
    own = {"resolve": here, "is_allowed": lambda address: address == "127.0.0.1"}
    return MediaFetcher(hosts or (f"{NAME}:{host.port}",), **own | options)


async def fetch(fetching: MediaFetcher, *urls: str) -> list[bytes]:
    held: list[int] = []
    found = await fetching.fetch({url: f"image {number}" for number, url in enumerate(urls)}, held.append)
    assert sum(held) == sum(map(len, found.values()))
    return [found[url] for url in urls]


@pytest.mark.parametrize(
    "path", ["/image", "/chunked", "/until-close", "/hints", "/more-than-it-says", "/moved", "/image?a=b#c"]
)
async def test_a_file_of_a_listed_host_is_fetched(host: ImageHost, path: str) -> None:
    assert await fetch(fetcher(host), host.url(path)) == [IMAGE]
    assert "#" not in host.requests[0]
    assert f"Host: {NAME}:{host.port}\r\n" in host.requests[0]
    assert host.requests[0].split(" ")[1] == path.partition("#")[0]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/less-than-it-says", "closes the connection before its answer is complete"),
        ("/cut", "closes the connection before its answer is complete"),
        ("/nothing", "closes the connection before its answer is complete"),
        ("/tiny-chunks", "sends too much around its answer"),
        ("/endless-head", "sends too much around its answer"),
        ("/endless", "sends too much: the images of a request may have 1 MiB together"),
        ("/missing", "answers with status 404"),
        ("/moved-nowhere", "answers with status 307"),
        ("/no-http", "sends an answer that is not HTTP"),
        ("/switch", "sends an answer that is not HTTP"),
        ("/moved-to-metadata", "image 0 redirects: it is a URL of 169.254.169.254, which this server's setting"),
        ("/moved-to-http", "image 0 redirects: it is a URL that this server does not fetch"),
        ("/moved-to-file", "image 0 redirects: it is a URL that this server does not fetch"),
        ("/moved-forever", "image 0 is redirected more than 3 times"),
    ],
)
async def test_a_hostile_answer_is_refused_by_name(
    host: ImageHost, path: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "BYTES_MAX", 2**20)
    fetching = fetcher(host)
    with pytest.raises(InvalidRequest, match=problem) as caught:
        await fetch(fetching, host.url(path))
    assert caught.value.param == "messages"
    assert host.num_sent < 8 * 2**20  # what the sockets' buffers hold, beside the limit
    assert await fetch(fetching, host.url("/image")) == [IMAGE]


async def test_a_host_that_stalls_takes_the_time_of_one_request_only(host: ImageHost) -> None:
    fetching = fetcher(host, seconds_max=1.0)
    stalled = asyncio.create_task(fetch(fetching, host.url("/image"), host.url("/stall")))
    assert await fetch(fetching, host.url("/image")) == [IMAGE]
    with pytest.raises(InvalidRequest, match=f"image 1 did not arrive from {NAME} within 1 s"):
        await stalled


async def test_fetches_at_a_time_are_limited(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "FETCHES_MAX", 4)
    monkeypatch.setattr(media, "FETCHES_EACH", 2)
    fetching = fetcher(host, seconds_max=2.0)
    stalled = [host.url(f"/stall?{number}") for number in range(9)]
    ends = await asyncio.gather(
        *(fetch(fetching, *stalled[first : first + 3]) for first in (0, 3, 6)), return_exceptions=True
    )
    assert [type(end) for end in ends] == [InvalidRequest, InvalidRequest, Overloaded]
    assert host.most_open == 4
    assert await fetch(fetching, host.url("/image")) == [IMAGE]


async def test_the_images_of_a_request_share_its_bytes(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [host.url(f"/image?{number}") for number in range(6)]
    monkeypatch.setattr(media, "BYTES_MAX", 6 * len(IMAGE))
    assert await fetch(fetcher(host), *urls) == [IMAGE] * 6
    monkeypatch.setattr(media, "BYTES_MAX", 6 * len(IMAGE) - 1)
    with pytest.raises(InvalidRequest, match="sends too much"):
        await fetch(fetcher(host), *urls)


async def test_the_addresses_are_resolved_once_and_all_are_checked(host: ImageHost) -> None:
    """A name that has another address the second time (DNS rebinding) is of no use."""
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    assert await fetch(fetcher(host, resolve=resolve), host.url("/image")) == [IMAGE]
    assert asked == [NAME]

    async def resolve_several(_: str, __: int) -> list[str]:
        return ["127.0.0.1", "10.0.0.7"]

    with pytest.raises(InvalidRequest, match="has an address that is not public"):
        await fetch(fetcher(host, resolve=resolve_several), host.url("/image"))
    assert len(host.requests) == 1


async def test_a_name_of_this_machine_is_refused_without_a_connection(host: ImageHost) -> None:
    fetching = MediaFetcher([f"localhost:{host.port}", f"127.0.0.1:{host.port}"])
    for name in ("localhost", "127.0.0.1"):
        with pytest.raises(InvalidRequest, match=f"{name} has an address that is not public"):
            await fetch(fetching, f"https://{name}:{host.port}/image")
    assert not host.requests


async def test_a_name_without_an_address_is_said(host: ImageHost) -> None:
    async def resolve(_: str, __: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(InvalidRequest, match=f"image 0 cannot be fetched: {NAME} has no address"):
        await fetch(fetcher(host, resolve=resolve), host.url("/image"))


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("1.1.1.1", True), ("2606:4700::1111", True), ("::ffff:1.1.1.1", True), ("64:ff9b::101:101", True),
        ("127.0.0.1", False), ("0.0.0.0", False), ("10.96.0.1", False), ("172.16.0.1", False), ("192.168.0.1", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("100.100.100.200", False), ("168.63.129.16", False),
        ("224.0.0.1", False), ("233.252.0.1", False), ("255.255.255.255", False), ("240.0.0.1", False),
        ("::1", False), ("::", False), ("fe80::1", False), ("fe80::1%eth0", False), ("fd00:ec2::254", False),
        ("ff0e::1", False), ("::ffff:10.0.0.1", False), ("::ffff:169.254.169.254", False),
        ("64:ff9b::a00:1", False), ("2002:a00:1::", False), ("2001:0:a00:1::", False), ("::a00:1", False),
    ],
)  # fmt: skip
def test_only_addresses_of_the_internet_are_public(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://images.example/a", "is a URL that this server does not fetch: it must be https://HOST/PATH"),
        ("file:///etc/passwd", "is a URL that this server does not fetch"),
        ("https://user:secret@images.example/a", "is a URL that this server does not fetch"),
        ("https://images.example@evil.example/a", "is a URL that this server does not fetch"),
        ("https://images.example\\@evil.example/", "is a URL that this server does not fetch"),
        ("https://images.example/a b", "is a URL that this server does not fetch"),
        ("https://images.example/a\r\nX: y", "is a URL that this server does not fetch"),
        ("https://images.example/\u00fc", "is a URL that this server does not fetch"),
        ("https://images\uff0eexample/", "is a URL that this server does not fetch"),
        ("https://[::1]/", "is a URL that this server does not fetch"),
        ("https://images.example./", "is a URL that this server does not fetch"),
        ("https://images.example:0/", "is a URL that this server does not fetch"),
        ("https://images.example:65536/", "is a URL that this server does not fetch"),
        ("https://images.example/" + "a" * 9000, "is a URL that this server does not fetch"),
        ("https://images.example.evil.example/", "of images.example.evil.example, which this server's setting"),
        ("https://a.images.example/", "of a.images.example, which this server's setting"),
        ("https://images.example:8443/", "of images.example:8443, which this server's setting"),
        ("https://127.0.0.1/", "of 127.0.0.1, which this server's setting `media_hosts`"),
    ],
)
async def test_other_urls_are_refused_without_a_look_at_their_host(url: str, problem: str) -> None:
    async def resolve(_: str, __: int) -> list[str]:
        raise AssertionError

    with pytest.raises(InvalidRequest, match=problem):
        await fetch(MediaFetcher(["images.example"], resolve), url)


@pytest.mark.parametrize(
    "url", ["https://images.example", "HTTPS://Images.Example:443/?a", " https://images.example#a "]
)
async def test_a_host_is_the_same_in_capitals_and_with_its_port(url: str) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        assert (name, port) == ("images.example", 443)
        raise socket.gaierror

    with pytest.raises(InvalidRequest, match=r"images\.example has no address"):
        await fetch(MediaFetcher(["images.example:443"], resolve), url)


async def test_without_hosts_the_setting_is_named() -> None:
    with pytest.raises(InvalidRequest, match="this server fetches none, because its setting `media_hosts`"):
        await fetch(MediaFetcher([]), "https://images.example/a.png")


@pytest.mark.parametrize(
    ("name", "trusted", "problem"), [("other.example", True, "Hostname mismatch"), (NAME, False, "self-signed")]
)
async def test_a_host_without_a_good_certificate_is_refused(
    host: ImageHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, trusted: bool, problem: str
) -> None:
    with image_host(tmp_path / "other", name) as other:
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(other.authority.certificate))
        with pytest.raises(
            InvalidRequest, match=f"a certificate that this server does not trust: .*({problem}|unable)"
        ):
            await fetch(fetcher(other), other.url("/image"))


async def test_a_proxy_connects_and_resolves(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def resolve(name: str, _: int) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"]

    with proxy(host.port) as (port, heads):
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@proxy.example:{port}")
        fetching = fetcher(host, resolve=resolve, is_allowed=lambda _: False)  # a proxy may be at a private address
        assert await fetch(fetching, host.url("/chunked")) == [IMAGE]
        assert asked == ["proxy.example"]
        assert heads[0].startswith(f"CONNECT {NAME}:{host.port} HTTP/1.1\r\nHost: {NAME}:{host.port}\r\n")
        assert base64.b64encode(b"me:p@ss").decode() in heads[0]
        monkeypatch.setenv("NO_PROXY", "images.example")
        with pytest.raises(InvalidRequest, match="has an address that is not public"):
            await fetch(fetching, host.url("/image"))
        assert len(heads) == 1


async def test_a_proxy_that_refuses_is_named(host: ImageHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy(host.port, b"403 Forbidden") as (port, _):
        monkeypatch.setenv("HTTPS_PROXY", f"http://proxy.example:{port}")
        with pytest.raises(InvalidRequest, match="this server's proxy answers with status 403"):
            await fetch(fetcher(host), host.url("/image"))
    monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy.example:1080")
    with pytest.raises(InvalidRequest, match="this server's proxy is not an http:// URL"):
        await fetch(fetcher(host), host.url("/image"))


async def test_memory_that_is_full_ends_the_fetch(host: ImageHost) -> None:
    def grow(_: int) -> None:
        raise Overloaded("full")

    with pytest.raises(RequestError, match="full"):
        await fetcher(host).fetch({host.url("/image"): "image 0"}, grow)
