"""Hides installed packages from a Python process."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement

_CODE = """
import sys
from importlib.machinery import PathFinder

ABSENT = {absent!r}


class Few(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Few
"""


def hide_all_but(folder: Path, packages: set[str]) -> set[str]:
    """Writes what a Python with the folder in PYTHONPATH obeys. Returns the modules that are hidden."""
    kept = set(needed_by(packages))
    absent = {
        module
        for module, owners in packages_distributions().items()
        if not kept & {owner.lower().replace("_", "-") for owner in owners} and not module.startswith("conveyor")
    }
    (folder / "sitecustomize.py").write_text(_CODE.format(absent=absent))
    return absent


def needed_by(packages: set[str]) -> Iterator[str]:
    """Return the packages and all packages that are installed with them."""
    found: set[str] = set()
    todo = set(packages)
    while todo:
        name = todo.pop()
        found.add(name)
        try:
            needed = map(Requirement, requires(name) or ())
        except PackageNotFoundError:  # for another system
            continue
        todo |= {
            r.name.lower().replace("_", "-") for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})
        } - found
    yield from found
