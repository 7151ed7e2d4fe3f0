"""Checks that one module provides all external programs, before they run, and that missing ones are named in a line."""

import ast
import os
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e import oci, vllm
from e2e.cluster import kind, local, preflight, programs, tools
from e2e.cluster.paths import REPOSITORY

MODULES = sorted(
    path for path in (REPOSITORY / "e2e").rglob("*.py") if not path.name.startswith(("test_", "crash"))
)  # fmt: skip
# Functions that start a process. Only `programs` may call them, except for the shell that the stories use like a user.
STARTERS = {
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp", "startfile"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "pty": {"spawn"},
}


def started_elsewhere(source: str) -> list[str]:
    """Return the calls that start a process, and imports that could give such a call another name."""
    found = []
    tree = ast.parse(source)
    types = {node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)}  # Popen[bytes]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node not in types:
            name = node.attr
            known = name in STARTERS.get(node.value.id, ())
            if known or (node.value.id == "os" and name.startswith(("exec", "spawn"))):
                found.append(f"{node.value.id}.{name}, line {node.lineno}")
        if isinstance(node, ast.ImportFrom) and node.module in STARTERS:
            hidden = {name.name for name in node.names} & STARTERS[str(node.module)]
            found += [f"from {node.module} import {name}, line {node.lineno}" for name in hidden]
        if isinstance(node, ast.Import):
            found += [
                f"import {name.name} as {name.asname}" for name in node.names if name.name in STARTERS and name.asname
            ]
    return found


# A client's environment has no module of the repository. This client starts the server that it installed.
OWN_SERVER = REPOSITORY / "e2e" / "clients" / "programs" / "open_webui_python.py"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_other_module_starts_a_program(module: Path) -> None:
    found = started_elsewhere(module.read_text())
    assert bool(found) == (module in (Path(str(programs.__file__)), OWN_SERVER)), found


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run(['buildah'])",
        "from subprocess import Popen",
        "import subprocess as s",
        "os.execvp('nft', ['nft'])",
        "asyncio.create_subprocess_exec('ip')",
    ],
)
def test_each_way_around_it_is_seen(source: str) -> None:
    assert started_elsewhere(source)


def test_a_program_in_no_table_cannot_be_run() -> None:
    with pytest.raises(LookupError, match="rm is in none"):
        programs.run("rm", "--version")


def test_a_program_is_installed_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without buildah. The installation of the package is replaced: it puts the program on the PATH."""
    installed: list[list[str]] = []

    def install(packages: list[str]) -> None:
        installed.append(packages)
        (tmp_path / "buildah").write_text("#!/bin/sh\necho $1")
        (tmp_path / "buildah").chmod(0o755)

    monkeypatch.setattr(programs, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(programs, "_can_install", lambda: True)
    monkeypatch.setattr(programs, "_install", install)
    for _ in range(2):
        assert programs.run("buildah", "said", capture_output=True, text=True).stdout == "said\n"
    assert installed == [["buildah"]]


@pytest.fixture
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with Python and no other program, nothing built, no right to install, and a large disk."""
    monkeypatch.setattr(programs, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    for module in (tools, preflight):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setenv("CLUSTER", "local")


@pytest.mark.usefixtures("nothing_there")
def test_all_that_lacks_is_said_at_once_and_first() -> None:
    with pytest.raises(programs.ProgramMissing) as caught:
        preflight.check([], with_images=True)
    assert [line.split(" need")[0] for line in str(caught.value).splitlines()] == [
        "a C compiler is", "the local cluster", "Go is",
    ]  # fmt: skip


@pytest.mark.usefixtures("nothing_there")
def test_who_may_not_install_is_told_the_command() -> None:
    with pytest.raises(programs.ProgramMissing, match=r"as root: apt-get install .* nftables skopeo$"):
        programs.require("nft", "skopeo", "nft")


@pytest.mark.usefixtures("nothing_there")
def test_what_people_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "kind")
    assert kind.wanted()
    with pytest.raises(programs.ProgramMissing, match=r"Docker is needed(.|\n)*kind is needed"):
        preflight.check([], with_images=True)


@pytest.mark.usefixtures("nothing_there")
def test_clients_are_not_begun_without_what_they_need() -> None:
    with pytest.raises(programs.ProgramMissing, match=r"Node.js is needed(.|\n)*npm is needed"):
        preflight.main("clients")


def test_an_old_go_is_refused_before_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "go").write_text("#!/bin/sh\necho go1.19.8")
    (tmp_path / "go").chmod(0o755)
    monkeypatch.setattr(programs, "search_path", lambda: str(tmp_path))
    assert [f"Go 1.26 or newer is needed to build Kubernetes; {tmp_path}/go is go1.19.8"] == list(
        preflight._lacking_for_go()
    )


def test_the_estimate_counts_what_is_left_to_do() -> None:
    everything = [preflight.PROGRAMS, preflight.IMAGES, preflight.DEMO]
    assert preflight.estimate(everything, cores=2).startswith("This takes about 17 minutes on this machine's 2 cores")
    assert preflight.estimate(everything, cores=8).startswith("This takes about 8 minutes")
    assert preflight.estimate([preflight.DEMO], cores=2).startswith("This takes about 2 minutes")


def test_the_disk_counts_what_is_given_back_again() -> None:
    first, second = preflight.Step("a", 1, 5, passing=20), preflight.Step("b", 1, 10)
    assert preflight.most_gigabytes([first, second]) == 25
    assert preflight.most_gigabytes([second, first]) == 35
    assert preflight.most_gigabytes([]) == 0


@pytest.mark.usefixtures("nothing_there")
@pytest.mark.parametrize(("target", "refused"), [("set-up", False), ("vllm", True)])
def test_make_vllm_is_not_begun_without_the_disk_of_its_image(
    monkeypatch: pytest.MonkeyPatch, target: str, refused: bool
) -> None:
    free = (preflight.most_gigabytes(preflight.steps()) + 1) * 1e9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    command = ["make", "--no-print-directory", "--dry-run", target]
    begun = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    first = begun.splitlines()[0].split()
    assert first[:-1] == ["python3", "-m", "e2e.cluster.preflight"]
    with pytest.raises(programs.ProgramMissing) as caught:
        preflight.main(first[-1])
    assert ("GB of disk are needed" in str(caught.value)) == refused


def test_a_node_that_has_vllms_image_gets_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "containerd.sock").touch()
    (tmp_path / "ctr").write_text(f"#!/bin/sh\necho {vllm.IMAGE}")
    (tmp_path / "ctr").chmod(0o755)
    monkeypatch.setattr(programs, "search_path", lambda: f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "CACHE", tmp_path)
    assert preflight.VLLM not in preflight.steps(with_vllm=True)
    (tmp_path / "local" / "containerd.sock").unlink()
    assert preflight.VLLM in preflight.steps(with_vllm=True)


@pytest.mark.parametrize(("version", "refused"), [("1.6.20~ds1", True), (f"{oci.VERSION}+unknown", False)])
def test_make_oci_refuses_a_cluster_that_its_programs_cannot_speak_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, refused: bool
) -> None:
    (tmp_path / "ctr").write_text(f"#!/bin/sh\necho 'Client:\n  Version:  9\n\nServer:\n  Version:  {version}'")
    (tmp_path / "ctr").chmod(0o755)
    monkeypatch.setattr(programs, "search_path", lambda: f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(local, "CONTAINERD_SOCKET", tmp_path / "socket")
    oci.check_cluster()
    (tmp_path / "socket").touch()
    with pytest.raises(programs.ProgramMissing, match="make cluster-down") if refused else nullcontext():
        oci.check_cluster()


def test_images_of_other_packages_count_as_images_to_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "local")
    monkeypatch.setattr(preflight, "CACHE", tmp_path)
    monkeypatch.setattr(preflight, "BUILT_FROM", tmp_path / "uv.lock")
    (tmp_path / "containerd").mkdir()
    images = {preflight.IMAGES, preflight.LOADING}
    assert images <= set(preflight.steps())
    shutil.copy(REPOSITORY / "uv.lock", tmp_path)
    assert images.isdisjoint(preflight.steps())
    (tmp_path / "uv.lock").write_text("of yesterday")
    assert images <= set(preflight.steps())
