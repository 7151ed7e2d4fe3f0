"""`python3 -m e2e.fresh COMMAND...`: see the package."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from e2e.cluster import cgroups, network, programs
from e2e.cluster.lock import exclusive
from e2e.cluster.paths import CACHE
from e2e.cluster.tools import ProgramMissing
from e2e.fresh.root import HOME, bare_root

_PROGRAMS = ("chroot", "cp", "debootstrap", "git", "mount", "unshare")
_ENTER = Path(__file__).with_name("enter.sh")
# Folders of this machine's home that may be lent, by the name that LEND gives them. The demo's model is not lent: it is
# made from Python's own documentation, so another Python would train another model and replace it.
_LENDABLE = {
    "tools": (CACHE / "tools", ".cache/conveyor/tools"),
    "images": (CACHE / "images", ".cache/conveyor/images"),
    "uv": (Path.home() / ".cache" / "uv", ".cache/uv"),
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STOP_SECONDS = 90  # more than `enter.sh` and the cluster's `down` wait for together
_PASSED_ON = re.compile(r"(?i).*_proxy|GOPROXY|GOSUMDB|PIP_(CERT|INDEX_URL)|UV_INDEX.*|SSL_CERT_.*|TERM")


def main(command: list[str]) -> int:
    if os.geteuid() != 0:
        raise ProgramMissing("a bare root needs root: use sudo")
    lent = [_LENDABLE[name] for name in _names()]
    programs.require(*_PROGRAMS)
    with exclusive():
        if network.exists() or cgroups.left():  # the bare root shares this machine's network and control groups
            raise ProgramMissing("a local cluster is up on this machine: make cluster-down")
        with bare_root() as root:
            return _run(root, lent, command)


def _run(root: Path, lendable: list[tuple[Path, str]], command: list[str]) -> int:
    lent = [(str(folder), f"/{HOME}/{place}") for folder, place in lendable if folder.exists()]
    path = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    if go := programs.found("go"):
        home = programs.run("go", "env", "GOROOT", capture_output=True, text=True, cwd="/").stdout.strip() or go
        lent.append((home, home))
        path.insert(0, f"{home}/bin")
    environment = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    environment |= {"HOME": f"/{HOME}", "PATH": os.pathsep.join(path), "ROOT": str(root), "LANG": "C.UTF-8"}
    environment["LENT"] = "\n".join(" ".join(pair) for pair in lent)
    # When the first process of a PID namespace ends, all others end. --kill-child ends the first with `unshare`.
    namespaces = ("--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
    inside = programs.start("unshare", *namespaces, "bash", _ENTER, *command, env=environment, start_new_session=True)

    try:
        return int(inside.wait())
    except SystemExit:
        _stop(inside)
        raise


def _stop(inside: "subprocess.Popen[bytes]") -> None:
    """Stop in order, as at a normal end: `enter.sh` ends the command, removes the cluster and ends itself."""
    print("fresh: stopping what runs in the bare root ...", flush=True)
    os.killpg(inside.pid, signal.SIGTERM)
    try:
        inside.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        inside.kill()
        inside.wait()


def end_on_signals() -> None:
    """The first SIGINT or SIGTERM ends this process in order; the others are ignored, so that they cannot disturb it.

    Must be called before a child is started. A program that a shell's `&` starts ignores SIGINT, and so would its
    children. After this call they do not.
    """

    def end(number: int, _: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in _SIGNALS:
        signal.signal(number, end)


def _names() -> list[str]:
    names = os.environ.get("LEND", "").split()
    if unknown := set(names) - _LENDABLE.keys():
        raise ProgramMissing(f"LEND knows {', '.join(_LENDABLE)}; not {', '.join(sorted(unknown))}")
    return names


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(main(sys.argv[1:]))
    except ProgramMissing as error:
        sys.exit(str(error))
