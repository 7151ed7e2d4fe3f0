"""Tests the cluster's command line: which cluster a command changes, what it requires, and that only one runs at a
time."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from e2e import kube
from e2e.cluster import __main__ as command_line
from e2e.cluster import kind, local, lock, provider, tools
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import build


@pytest.fixture(autouse=True)
def _no_choice_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTER", raising=False)
    monkeypatch.delenv("KUBECONFIG", raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, *, has_kind: bool, up: tuple[ModuleType, ...] = ()) -> None:
    monkeypatch.setattr(kind, "available", lambda: has_kind)
    monkeypatch.setattr(kind, "running", lambda: kind in up)
    monkeypatch.setattr(local, "running", lambda: local in up)
    monkeypatch.setattr(kind, "exists", lambda: kind in up)
    monkeypatch.setattr(local, "exists", lambda: local in up)


def context_file(folder: Path, context: str) -> str:
    (folder / "kubeconfig").write_text(f"{{apiVersion: v1, kind: Config, current-context: {context}}}")
    return str(folder / "kubeconfig")


def test_without_a_cluster_kind_is_taken_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, has_kind=True)
    assert provider.addressed() is kind
    machine(monkeypatch, has_kind=False)
    assert provider.addressed() is local


def test_the_cluster_that_is_up_is_meant_and_removed_whatever_would_be_brought_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(monkeypatch, has_kind=True, up=(local,))
    assert provider.addressed() is local
    assert provider.existing() == [local]


def test_the_variable_cluster_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, has_kind=True, up=(kind,))
    monkeypatch.setenv("CLUSTER", "local")
    assert provider.addressed() is local
    assert provider.existing() == [local]


def test_a_new_terminal_finds_the_cluster_that_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, has_kind=False, up=(local,))
    command_line.env()
    find = "for each in kubectl helm kubectl-conveyor; do command -v $each; done"
    script = f'{capsys.readouterr().out}\necho "$KUBECONFIG"; {find}'
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        str(local.KUBECONFIG), *(f"{tools.folder()}/{name}" for name in ("kubectl", "helm")),
        f"{REPOSITORY}/.venv/bin/kubectl-conveyor",
    ]  # fmt: skip


def test_without_a_cluster_the_output_explains_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, has_kind=False)
    with pytest.raises(command_line.NoCluster, match="`make demo` or `make cluster` brings one up"):
        command_line.env()


def test_images_go_to_the_cluster_of_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, has_kind=False, up=(local,))
    monkeypatch.setenv("KUBECONFIG", context_file(tmp_path, "kind-conveyor"))
    assert provider.of_kubeconfig() is kind


def test_a_context_that_is_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", context_file(tmp_path, "production"))
    with pytest.raises(SystemExit, match="'production'"):
        kube.require_our_cluster()
    with pytest.raises(provider.ContextRefused, match="'production'"):
        provider.of_kubeconfig()


@pytest.mark.parametrize("module", ["e2e.deploy", "e2e.gateway", "e2e.demo"])
def test_a_missing_program_is_reported_in_one_sentence(tmp_path: Path, module: str) -> None:
    environment = {
        "PATH": "", "CONVEYOR_CACHE": str(tmp_path), "KUBECONFIG": context_file(tmp_path, "conveyor-local"),
    }  # fmt: skip
    command = [sys.executable, "-m", module]
    finished = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
    assert finished.returncode == 1
    assert finished.stderr == "kubectl is not built: run `make tools`\n"


def test_without_go_kind_does_with_the_clients_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "CACHE", tmp_path / "cache")  # an empty cache of built programs
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tools.ProgramMissing, match=r"kubectl and helm are needed: .* Go"):
        build.provide_clients()
    for name in tools.CLIENTS:
        (tmp_path / name).touch(mode=0o755)
    build.provide_clients()
    assert tools.binary("kubectl") == tmp_path / "kubectl"
    with pytest.raises(tools.ProgramMissing, match="Go is needed"):
        build.build_missing(tools.ALL)


def test_a_second_command_waits_until_the_first_is_done_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "CACHE", tmp_path)
    code = "from e2e.cluster.lock import exclusive\nwith exclusive(): print('inside')"
    environment = {**os.environ, "CONVEYOR_CACHE": str(tmp_path)}
    with lock.exclusive():
        second = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert second.stdout is not None
        assert "waiting" in second.stdout.readline()
    assert second.communicate()[0] == "inside\n"
