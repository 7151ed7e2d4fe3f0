"""Tests the command for the bare Debian root, until it would make one. CI makes one and starts the cluster in it."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster import cgroups, network, programs
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import ProgramMissing
from e2e.fresh import __main__ as fresh
from e2e.fresh import root

# A root with this machine's own programs. `down` ends a cluster there.
RUN = """
import signal, sys
from pathlib import Path
from e2e.fresh import __main__ as fresh, root
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
folder, command = Path(sys.argv[1]), sys.argv[2]
root._FOLDER, root._NETWORK, root._pristine = folder / "fresh", (), lambda: folder / "debian"
fresh.end_on_signals()
with root.bare_root() as made:
    fresh._run(made, [(Path("/usr"), "../usr"), (folder / "out", "out")], ["/bin/bash", "-c", command])
"""
COMMAND = """
mkdir --parents .venv/bin
printf '#!/bin/sh\ntouch /root/out/down' > .venv/bin/python
chmod +x .venv/bin/python
setsid sleep 600 &
trap '' INT TERM
echo begun
sleep 600
sleep 600
"""


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(programs, "require", lambda *names: None)
    monkeypatch.setattr("e2e.cluster.lock.CACHE", tmp_path)
    monkeypatch.setattr(network, "exists", lambda: False)
    monkeypatch.setattr(cgroups, "left", list)
    monkeypatch.setattr(root, "_FOLDER", tmp_path / "fresh")
    monkeypatch.delenv("LEND", raising=False)


def test_who_is_not_root_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ProgramMissing, match="needs root"):
        fresh.main(["true"])


@pytest.mark.parametrize(("module", "name", "there"), [(network, "exists", True), (cgroups, "left", ["a group"])])
def test_beside_a_cluster_of_the_machine_nothing_begins(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, there: object
) -> None:
    monkeypatch.setattr(module, name, lambda: there)
    with pytest.raises(ProgramMissing, match="make cluster-down"):
        fresh.main(["true"])


def test_what_is_lent_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEND", "tools everything")
    with pytest.raises(ProgramMissing, match="LEND knows tools, images, uv; not everything"):
        fresh.main(["true"])


def test_what_a_killed_run_has_left_is_removed_and_so_is_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "fresh" / "run-root" / "left"
    left.mkdir(parents=True)
    (tmp_path / "debian").mkdir()
    monkeypatch.setattr(root, "_pristine", lambda: tmp_path / "debian")
    monkeypatch.setattr(root, "_NETWORK", ())
    with contextlib.suppress(KeyboardInterrupt), root.bare_root() as made:
        assert not left.exists()
        assert (made / "src" / "Makefile").exists()
        raise KeyboardInterrupt
    assert not (tmp_path / "fresh" / "run-root").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode != 0,
    reason="needs namespaces of its own, so root",
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_in_the_root_then_the_cluster_and_removes_the_root(
    tmp_path: Path, number: signal.Signals
) -> None:
    debian = tmp_path / "debian"
    for folder in ("dev", "proc", "root", "sys", "tmp"):
        (debian / folder).mkdir(parents=True)
    for folder in ("bin", "lib", "lib64"):
        (debian / folder).symlink_to(f"usr/{folder}")
    (tmp_path / "fresh").mkdir()
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", RUN, tmp_path, COMMAND]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "begun\n"
            running.send_signal(number)
            assert running.wait(30) == 128 + number
        finally:
            running.kill()
    assert (tmp_path / "out" / "down").exists()
    assert not (tmp_path / "fresh" / "run-root").exists()
