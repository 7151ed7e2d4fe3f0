"""A repository on the hub: its revisions, and its files with the digests that git and LFS would give them."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LARGE_BYTES = 10_000  # larger files are LFS files here; on a real hub, .gitattributes decides by name
REVISIONS = ".revisions"
MAIN = "main"


@dataclass(frozen=True)
class StoredFile:
    """A file of a revision."""

    name: str  # path in the repository
    path: Path

    @property
    def is_large(self) -> bool:
        return self.size > LARGE_BYTES or self.name.endswith(".safetensors")

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @cached_property
    def blob_id(self) -> str:
        """Return git's id of the content, or, for a large file, of the LFS pointer to it."""
        content = self.pointer if self.is_large else self.path.read_bytes()
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()

    @property
    def pointer(self) -> bytes:
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.blob_id


@dataclass(frozen=True)
class Revision:
    """The files of a branch or tag, and the commit that they make."""

    name: str
    files: tuple[StoredFile, ...]

    @cached_property
    def commit(self) -> str:
        listing = "".join(f"{file.name}\0{file.etag}\n" for file in self.files)
        return hashlib.sha1(listing.encode(), usedforsecurity=False).hexdigest()

    def find(self, name: str) -> StoredFile | None:
        return next((file for file in self.files if file.name == name), None)


class Repository:
    """A folder of the hub's root. It is read again at each request."""

    def __init__(self, root: Path, repository_id: str) -> None:
        self.id = repository_id
        self._folder = root / repository_id

    @property
    def exists(self) -> bool:
        return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", self.id) is not None and self._folder.is_dir()

    def find(self, revision: str) -> Revision | None:
        """Return the revision with this name or this commit."""
        return next((found for found in self._revisions() if revision in (found.name, found.commit)), None)

    def _revisions(self) -> Iterator[Revision]:
        yield _read_revision(MAIN, self._folder)
        others = self._folder / REVISIONS
        if others.is_dir():
            for folder in sorted(others.iterdir()):
                yield _read_revision(folder.name, folder)


def _read_revision(name: str, folder: Path) -> Revision:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(str(path.relative_to(folder)), path) for path in paths]
    return Revision(name, tuple(StoredFile(n, path) for n, path in names if not n.startswith(".")))
