"""Tests that operator, gateway and metrics server find the same cluster. The last two connect in the same way."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from conveyor_kube.kubeconfig import load_configuration
from conveyor_kube.watch import connect
from conveyor_process.settings import SettingsError


async def operator_host(kubeconfig: str) -> str:
    return str((await load_configuration(kubeconfig)).host)


async def gateway_host(kubeconfig: str) -> str:
    async with connect(kubeconfig) as client:
        return str(client.configuration.host)


each = pytest.mark.parametrize("find_host", [operator_host, gateway_host])
FindHost = Callable[[str], Awaitable[str]]


@each
async def test_a_kubeconfig_variable_wins_over_the_pods_account(
    find_host: FindHost, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBECONFIG", str(nowhere))
    assert await find_host("") == "http://127.0.0.1:9"


@each
@pytest.mark.parametrize("text", ["", "no kubeconfig", "a: [", "kind: Config"])
async def test_a_file_that_is_no_kubeconfig_is_refused_with_one_sentence(
    text: str, find_host: FindHost, tmp_path: Path
) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(SettingsError, match=rf"^cannot connect to Kubernetes: {path}: .*; set --kubeconfig$"):
        await find_host(str(path))
