"""Tests which proxy the environment sets for a URL, and which addresses NO_PROXY exempts, as Go programs read it."""

import pytest

from conveyor_process.proxies import bypasses_proxy, find_proxy


@pytest.mark.parametrize(
    ("exempt", "url", "is_exempt"),
    [
        ("10.0.0.0/8", "https://10.3.0.1:6443", True),
        ("10.0.0.0/8", "https://11.0.0.1:6443", False),
        (".svc, 10.3.0.0/16", "http://10.3.9.9", True),
        ("fd00::/8", "http://[fd00::7]:9000", True),
        ("10.0.0.0/8", "http://[fd00::7]:9000", False),
        (".svc", "http://minio.storage.svc:9000", True),
        ("example.com", "https://s3.example.com", True),
        ("10.0.0.7", "http://user:10.0.0.7@10.0.0.8", False),
        ("10.0.0.0/x", "http://10.0.0.8", False),
        ("*", "http://10.0.0.8", True),
        ("", "http://10.0.0.8", False),
        ("", "nonsense", True),
    ],
)
@pytest.mark.parametrize("variable", ["NO_PROXY", "no_proxy"])
def test_names_addresses_and_networks_are_exempt(
    monkeypatch: pytest.MonkeyPatch, variable: str, exempt: str, url: str, is_exempt: bool
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, exempt)
    assert bypasses_proxy(url) is is_exempt


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("https://10.96.0.1:443", "http://proxy:3128"),
        ("http://10.96.0.1", None),
        ("https://api.internal:6443", None),
        ("https://127.0.0.1:6443", None),
        ("", None),
    ],
)
def test_a_proxy_comes_from_the_environment(url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,.internal")
    assert find_proxy(url) == proxy
