"""A folder for PYTHONPATH that takes packages, and functions that only Linux has, away from Python processes."""

from pathlib import Path

_PACKAGES = """\
from importlib.machinery import PathFinder
find = PathFinder.find_spec.__func__
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in {hidden} else find(cls, name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""
_LINUX = """\
import io, os, socket
for module, names in ((os, "sched_getaffinity memfd_create pipe2"), (socket, "TCP_KEEPIDLE TCP_USER_TIMEOUT")):
    for name in names.split():
        delattr(module, name)
opened, exists = io.open, os.path.exists
def open_file(file, *arguments, **options):
    if str(file).startswith("/proc/"):
        raise FileNotFoundError(file)
    return opened(file, *arguments, **options)
io.open = open_file
import pathlib
pathlib.Path.exists = lambda path: not str(path).startswith("/proc/") and exists(path)
"""


def hide_packages(folder: Path, *names: str, linux: bool = False) -> Path:
    """Write the folder and return it. A process with this folder on its path does not find these packages.

    linux: it has no functions and files of Linux either.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        _PACKAGES.replace("{hidden}", repr(set(names))) + (_LINUX if linux else "")
    )
    return folder
