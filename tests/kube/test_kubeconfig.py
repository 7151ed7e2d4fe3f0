"""Tests how the cluster is found: the setting, KUBECONFIG, the pod's account, the home folder, in this order."""

import asyncio
from pathlib import Path

import pytest
from kubernetes.aio.config import incluster_config

from conveyor_kube.kubeconfig import find_kubeconfig, load_configuration
from conveyor_process.settings import SettingsError
from e2e.cluster.certificates import Authority

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file"
    path.touch()
    return str(path)


def test_the_setting_wins_over_everything(file: str) -> None:
    assert find_kubeconfig(file, {"KUBECONFIG": "/other", **POD}) == file


def test_the_variable_wins_over_the_pods_account(file: str) -> None:
    assert find_kubeconfig("", {"KUBECONFIG": file, **POD}) == file


def test_the_pods_account_wins_over_the_home_folder() -> None:
    assert find_kubeconfig("", POD) == ""


def test_outside_of_a_pod_it_is_the_file_of_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SettingsError, match=r"~/\.kube/config is not a file; set --kubeconfig"):
        find_kubeconfig("", {})
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").touch()
    assert find_kubeconfig("", {}) == "~/.kube/config"


def test_of_several_files_one_that_is_there_is_enough(file: str) -> None:
    assert find_kubeconfig("", {"KUBECONFIG": f"/nonexistent:{file}"}) == f"/nonexistent:{file}"


def test_a_file_that_is_named_and_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="/nonexistent is not a file; set --kubeconfig"):
        find_kubeconfig("", {"KUBECONFIG": "/nonexistent", **POD})


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the token of a pod's ServiceAccount."""
    authority, key = tmp_path / "ca.crt", tmp_path / "token"
    authority.write_bytes(Authority(tmp_path, "authority").certificate.read_bytes())
    key.write_text("token")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(key))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return key


@pytest.mark.usefixtures("token")
async def test_a_pod_calls_its_api_server_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_PROXY often has networks, as programs in Go take them, and not the address of the API server."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", ".svc,10.0.0.0/8")
    configuration = await load_configuration("")
    assert (configuration.host, configuration.proxy) == ("https://10.96.0.1:443", None)


async def test_each_call_has_the_newest_token_whatever_the_clock_says(token: Path) -> None:
    configuration = await load_configuration("")
    assert await configuration.get_api_key_with_prefix("BearerToken") == "bearer token"
    await asyncio.to_thread(token.write_text, "newer")
    assert await configuration.get_api_key_with_prefix("BearerToken") == "bearer newer"
    await asyncio.to_thread(token.unlink)
    assert await configuration.get_api_key_with_prefix("BearerToken") == "bearer newer"
