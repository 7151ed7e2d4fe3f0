"""Runs programs of another commit. Used by `faults` and by `conveyor_bench gateway-beside`."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.cluster.paths import REPOSITORY

_GIT = ("git", "-C", str(REPOSITORY))


@dataclass(frozen=True)
class Checkout:
    """A checkout of a commit, and what to call it."""

    folder: Path
    name: str

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let processes that are started in the body run this checkout's programs, with the installed dependencies."""
        rooms = {package.parent for package in self.folder.glob("*/conveyor_*")}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(map(str, sorted(rooms))))
            found = subprocess.check_output([sys.executable, "-c", "import conveyor_gateway as g; print(g.__file__)"])
            assert found.decode().startswith(str(self.folder))
            yield


PRESENT = Checkout(REPOSITORY, "present")


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Checkout]:
    """Check out `commit` in a temporary folder. Raises subprocess.CalledProcessError if there is no such commit."""
    name = subprocess.check_output([*_GIT, "rev-parse", "--short=8", "--verify", f"{commit}^{{commit}}"], text=True)
    with tempfile.TemporaryDirectory(prefix="conveyor-commit-") as folder:
        checkout = Path(folder, "checkout")
        subprocess.run([*_GIT, "worktree", "add", "--quiet", "--detach", checkout, commit], check=True)
        try:
            yield Checkout(checkout, name.strip())
        finally:
            subprocess.run([*_GIT, "worktree", "remove", "--force", checkout], check=True)
