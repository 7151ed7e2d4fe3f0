"""A bare Debian in a folder: made once from Debian's packages, copied for each run, deleted after it.

Called by `e2e.fresh`. Knows nothing of Kubernetes.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.progress import announced

HOME = Path("root")
_FOLDER = CACHE / "fresh"
_RELEASE = "bookworm"
# What the README requires: make, a C compiler, Python with venv. A clone also needs git and the authorities.
_PACKAGES = ("ca-certificates", "gcc", "git", "libc6-dev", "make", "python3-venv")
# This machine's network settings. A new user of it would also have its proxy's settings and authorities.
_NETWORK = ("etc/hosts", "etc/resolv.conf", "etc/apt/apt.conf.d", "etc/ssl/certs")


@contextlib.contextmanager
def bare_root() -> Iterator[Path]:
    """Yield a bare Debian with a clone of the repository in `/src`. It is deleted at the end."""
    for left in _FOLDER.glob("run-*"):  # of a killed run: the caller holds the lock, so no other run uses it
        shutil.rmtree(left)
    pristine = _pristine()
    root = _FOLDER / "run-root"
    try:
        programs.run("cp", "--archive", "--reflink=auto", pristine, root, check=True)
        for path in _NETWORK:
            _copy(Path("/") / path, root / path)
        programs.run("git", "clone", "--quiet", REPOSITORY, root / "src", check=True)
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _pristine() -> Path:
    recipe = hashlib.sha256(json.dumps([_RELEASE, _PACKAGES]).encode()).hexdigest()[:12]
    root = _FOLDER / f"debian-{recipe}"
    if not root.exists():
        half_made = _FOLDER / "run-debian"
        half_made.mkdir(parents=True)
        with announced("fresh: making a bare Debian"):
            include = f"--include={','.join(_PACKAGES)}"
            made = programs.run(
                "debootstrap", "--variant=minbase", include, _RELEASE, half_made, capture_output=True, text=True
            )
        if made.returncode:
            raise RuntimeError(f"debootstrap failed:\n{made.stdout[-2000:]}{made.stderr[-2000:]}")
        half_made.rename(root)
    return root


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        options = ("--archive", "--remove-destination", "--no-target-directory")
        programs.run("cp", *options, source, target, check=True)
    elif source.exists():
        shutil.copyfile(source, target)
