"""Checks that one module provides all external programs, before they run, and that missing ones are named in a line."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from e2e.cluster import kind, owners, preflight, programs, tools


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
    monkeypatch.setattr(owners, "describe_others", list)
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
def test_a_user_who_may_not_install_gets_the_command() -> None:
    with pytest.raises(programs.ProgramMissing, match=r"as root: apt-get install .* nftables skopeo$"):
        programs.require("nft", "skopeo", "nft")


@pytest.mark.usefixtures("nothing_there")
def test_what_people_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTER", "kind")
    assert kind.is_requested()
    with pytest.raises(programs.ProgramMissing, match=r"Docker is needed(.|\n)*kind is needed"):
        preflight.check([], with_images=True)


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
