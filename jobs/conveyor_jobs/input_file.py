"""The file with a job's requests: fetches it if it has an http(s) address, checks every line, reads the lines.

Called by `job`. The whole file is checked before the first request is sent, so that a mistake in its last line does not
cost a night.
"""

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from conveyor_jobs.request import BatchRequest, InvalidLine, parse_line
from conveyor_process.log import without_secrets

MAX_LINE_BYTES: Final = 32 << 20  # above the longest body that a gateway accepts by default
MAX_TOLD: Final = 20  # mistakes that are reported
_FETCH_TIMEOUT_SECONDS: Final = 60.0
_PIECE_BYTES: Final = 1 << 20


class InputError(Exception):
    """The input cannot be read."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A line that is no request. `line` counts from 1."""

    line: int
    message: str


class InvalidInput(InputError):
    """The input has mistakes, of which the first MAX_TOLD are told."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__("; ".join(f"line {each.line}: {each.message}" for each in mistakes))
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class InputFile:
    """A checked file. `paths`: the different paths of its requests."""

    path: Path
    sha256: str
    num_requests: int
    paths: frozenset[str]

    def read(self) -> Iterator[tuple[int, BatchRequest]]:
        """Yield each request with its number, from 0. Raises InvalidLine if the file has changed since its check."""
        for number, (_, line) in enumerate(_read_lines(self.path)):
            yield number, parse_line(line)


def open_input(given: str, folder: Path) -> InputFile:
    """Fetch the input into `folder` if it has an address, and check it. Raises InputError."""
    try:
        return _check(_fetch(given, folder) if given.startswith(("http://", "https://")) else Path(given))
    except OSError as error:
        raise InputError(f"the input cannot be read: {without_secrets(str(error))}") from error


def _fetch(address: str, folder: Path) -> Path:
    """Fetch the file once. A job that is started again uses the fetched file, as its address may have expired."""
    fetched = folder / "input.jsonl"
    if fetched.exists():
        return fetched
    part = folder / "input.jsonl.part"
    try:
        with urllib.request.urlopen(address, timeout=_FETCH_TIMEOUT_SECONDS) as response, part.open("wb") as file:
            wanted, received = response.headers.get("Content-Length"), 0
            while piece := response.read(_PIECE_BYTES):
                received += len(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    except (urllib.error.URLError, ValueError, OSError) as error:
        raise InputError(f"{without_secrets(address)} cannot be fetched: {without_secrets(str(error))}") from error
    if wanted is not None and received != int(wanted):
        raise InputError(f"{without_secrets(address)} ended after {received} of {wanted} bytes")
    part.rename(fetched)
    return fetched


def _check(path: Path) -> InputFile:
    seen: set[int] = set()  # hashes, because a job may have millions of requests
    digest, paths, mistakes = hashlib.sha256(), set[str](), list[Mistake]()
    num_requests = 0
    for number, line in _read_lines(path):
        digest.update(line)
        try:
            request = parse_line(line)
            if hash(request.custom_id) in seen:
                raise InvalidLine(f"custom_id {request.custom_id[:100]!r} occurs twice")
        except InvalidLine as error:
            mistakes.append(Mistake(number, str(error)))
            if len(mistakes) == MAX_TOLD:
                break
            continue
        seen.add(hash(request.custom_id))
        paths.add(request.path)
        num_requests += 1
    if not num_requests and not mistakes:
        mistakes.append(Mistake(1, "the file has no requests"))
    if mistakes:
        raise InvalidInput(mistakes)
    return InputFile(path, digest.hexdigest(), num_requests, frozenset(paths))


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number from 1. Raises InvalidInput for a line without end."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise InvalidInput([Mistake(number, f"it is longer than {MAX_LINE_BYTES >> 20} MiB")])
            if not line.isspace():
                yield number, line
