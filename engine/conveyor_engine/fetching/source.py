"""Describes a model's files with their sizes and digests, and checks local copies. Used for hubs and buckets."""

import hashlib
import io
import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from conveyor_engine.errors import ModelError
from conveyor_engine.gguf.files import SUFFIX
from conveyor_engine.model_files import PIPELINE_FOLDERS, PIPELINE_INDEX
from conveyor_protocol.failure_reasons import FailureReason

# The folders of sentence-transformers' modules that the engine reads, and the files in them.
MODULE_FOLDERS: Final = (
    "1_Pooling", "1_LogitScore", "1_SpladePooling", "1_Dense", "2_Dense", "3_Dense",
    "2_MultiVectorMask", "3_MultiVectorMask",
)  # fmt: skip
MODULE_FILES: Final = tuple(
    f"{folder}/{name}"
    for folder in MODULE_FOLDERS
    for name in ("config.json", *(["model.safetensors"] if folder.endswith("Dense") else []))
)
# Settings of Stanford's ColBERT, and the heads of bge-m3. The engine reads the heads without unpickling them.
HEAD_FILES: Final = ("artifact.metadata", "colbert_linear.pt", "sparse_linear.pt")
_PLAIN_NAME = re.compile(r"(?!\.\.?$)[\w.+-]+")  # names come from the source and are not trusted
_MAX_NAME_BYTES = 200  # file systems allow 255, and an incomplete file has a longer name
_HASH_BLOCK_BYTES = 1 << 20
_PROGRESS_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file, with the size and the digest that its source announces."""

    name: str
    size: int  # bytes
    digest: str  # in the source's format: letters, digits and dashes
    hashing: Literal["sha256", "git", "md5", "none"]  # git: the blob id; none: the digest cannot be computed from bytes
    part_bytes: int | None = None  # for md5 in parts: `digest` is the MD5 of the parts' MD5s, "-", their number


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """The files that `keep_known` keeps, of which the engine loads some."""

    title: str  # for messages
    commit: str  # equal commits have equal files
    files: tuple[RemoteFile, ...]

    def __str__(self) -> str:
        return self.title


class Source(Protocol):
    """A source of models."""

    def describe(self, commit: str | None = None) -> RemoteModel:
        """Describe the model as it is now, or at `commit`. Raises ModelError."""

    def download(self, model: RemoteModel, file: RemoteFile, path: Path) -> None:
        """Append the missing bytes to `path`, or fewer if the source's response ends early. Raises ModelError."""


def is_plain_name(name: str) -> bool:
    """Return whether a name has no folder, and no characters that could forge a log line."""
    return _PLAIN_NAME.fullmatch(name) is not None and len(name.encode()) <= _MAX_NAME_BYTES


def keep_known(names: Iterable[str]) -> set[str]:
    """Return the names at the root, MODULE_FILES, and GGUF files in folders, in which a hub has large ones in parts.

    If the root has a PIPELINE_INDEX, also return the names in the folders of the pipeline's parts.
    """
    listed = set(names)
    folders = [f"{folder}/" for folder in PIPELINE_FOLDERS] if PIPELINE_INDEX in listed else []
    parts = {name for folder in folders for name in listed if is_plain_name(name.removeprefix(folder))}
    of_gguf = {name for name in listed if name.endswith(SUFFIX) and all(map(is_plain_name, name.split("/", 1)))}
    return {name for name in listed if name in MODULE_FILES or is_plain_name(name)} | parts | of_gguf


def find_present(path: Path, file: RemoteFile) -> int:
    """Return how many bytes of `file` are at `path`.

    A local file that is larger than `file` is wrong and is deleted.
    """
    present = path.stat().st_size if path.exists() else 0
    if present > file.size:
        path.unlink()
        return 0
    if present:
        _log.info("event=file_resumed file=%s bytes_present=%d bytes=%d", file.name, present, file.size)
    return present


class ProgressFile(io.FileIO):
    """A file whose `write` writes all bytes or raises OSError. It logs the progress every few seconds.

    Bytes beyond the announced size raise ModelError (ChecksumMismatch), because they could fill the volume.
    """

    def __init__(self, path: Path, file: RemoteFile) -> None:
        super().__init__(path, "ab")
        self._file = file
        self._spoke = time.monotonic()

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self._file.size:
            self.truncate(0)
            message = f"the source sent more than the announced {self._file.size} bytes of {self._file.name}; "
            message += "the local copy was deleted"
            raise ModelError(message, reason=FailureReason.CHECKSUM_MISMATCH)
        written = 0
        while written < len(data):  # a disk that becomes full writes some bytes first, then fails
            written += super().write(data[written:])
        if time.monotonic() - self._spoke > _PROGRESS_SECONDS:
            self._spoke = time.monotonic()
            percent = 100 * self.tell() / max(1, self._file.size)
            _log.info("event=fetching file=%s percent=%.0f bytes=%d", self._file.name, percent, self._file.size)
        return written


def compute_digest(path: Path, file: RemoteFile) -> str:
    """Compute the digest of the file in the source's format. Return the announced digest if it cannot be computed."""
    size = path.stat().st_size
    if file.hashing == "none":
        return file.digest
    if file.hashing == "sha256":
        return _hash(path, hashlib.sha256(), 0, size).hex()
    if file.hashing == "git":
        return _hash(path, hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False), 0, size).hex()
    if file.part_bytes is None:
        return _hash_part(path, 0, size).hex()
    parts = [_hash_part(path, start, file.part_bytes) for start in range(0, size, file.part_bytes)]
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _hash_part(path: Path, start: int, size: int) -> bytes:
    return _hash(path, hashlib.md5(usedforsecurity=False), start, size)


def _hash(path: Path, digest: Any, start: int, size: int) -> bytes:
    with path.open("rb") as content:
        content.seek(start)
        while block := content.read(min(_HASH_BLOCK_BYTES, size)):
            digest.update(block)
            size -= len(block)
    result: bytes = digest.digest()
    return result
