"""The file with a job's requests: fetches it if it has an http(s) address, checks every line, reads the lines.

Called by `job`. The whole file is checked before the first request is sent, so that a mistake in its last line does not
cost a night.
"""

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

from conveyor_jobs.request import BatchRequest, InvalidLine, parse_line
from conveyor_process.log import without_secrets
from conveyor_process.proxies import bypasses_proxy

MAX_LINE_BYTES: Final = 32 << 20  # above the longest body that a gateway accepts by default
MAX_SHOWN: Final = 20  # mistakes that are reported
_FETCHED: Final = "input.jsonl"
_ADDRESS: Final = "input.address"  # of the fetched file, without its query
_FETCH_TIMEOUT_SECONDS: Final = 60.0
_PIECE_BYTES: Final = 1 << 20


class InputError(Exception):
    """The input cannot be read now. Another start may help."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """A line that is no request. `line` counts from 1; 0 is the file itself."""

    line: int
    message: str


class InvalidInput(Exception):
    """The input has mistakes, of which the first MAX_SHOWN are listed."""

    def __init__(self, *mistakes: Mistake) -> None:
        super().__init__("; ".join(f"line {each.line}: {each.message}" for each in mistakes))
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class InputFile:
    """A checked file. `paths`: the different paths of its requests. `stamp`: its size and the time of its change."""

    path: Path
    sha256: str
    num_requests: int
    paths: frozenset[str]
    stamp: tuple[int, int]

    def read(self) -> Generator[tuple[int, BatchRequest], None, None]:
        """Yield each request with its number, from 0. Raises InvalidInput if the file has changed since its check."""
        changed = InvalidInput(Mistake(0, "the input has changed while the job ran: use another folder"))
        num_read = 0
        with self.path.open("rb") as file:
            for _, line in _read_lines(file):
                if _stamp(file) != self.stamp or num_read == self.num_requests:
                    raise changed
                yield num_read, parse_line(line)
                num_read += 1
        if num_read < self.num_requests:
            raise changed


def open_input(given: str, folder: Path) -> InputFile:
    """Fetch the input into `folder` if it has an address, and check it. Raises InputError and InvalidInput."""
    try:
        if given.startswith(("http://", "https://")):
            return _open_fetched(given, folder)
        if "://" in given:
            raise InvalidInput(Mistake(0, "the input must be a path or an http(s) address"))
        if not Path(given).is_file():
            raise InvalidInput(Mistake(0, f"there is no file {given}"))
        return _check(Path(given))
    except OSError as error:
        raise InputError(f"the input cannot be read: {error}") from error


def _open_fetched(address: str, folder: Path) -> InputFile:
    """Fetch the file once. A job that is started again uses the fetched file, as its address may have expired."""
    shown, fetched, address_file = without_secrets(address), folder / _FETCHED, folder / _ADDRESS
    if not _is_address(address):
        raise InvalidInput(
            Mistake(0, "the input's address must be http[s]://HOST[:PORT]/PATH without user and password")
        )
    if fetched.exists():
        if address_file.read_text() != shown:
            raise InvalidInput(Mistake(0, f"{folder} has the results of another input: use another folder"))
        return _check(fetched)
    part = folder / f"{_FETCHED}.part"
    _fetch(address, part)
    checked = _check(part)
    address_file.write_text(shown)
    part.rename(fetched)
    return replace(checked, path=fetched)


def _is_address(address: str) -> bool:
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.username is None and parts.port != 0  # `port` may raise ValueError
    except ValueError:
        return False


def _build_opener(address: str) -> urllib.request.OpenerDirector:
    proxies: dict[str, str] | None = {} if bypasses_proxy(address) else None  # None: those of the environment
    return urllib.request.build_opener(urllib.request.ProxyHandler(proxies))


def _fetch(address: str, part: Path) -> None:
    """Fetch the file. Errors leave out the address's query, and texts of libraries that may repeat it."""
    shown = without_secrets(address)
    try:
        with _build_opener(address).open(address, timeout=_FETCH_TIMEOUT_SECONDS) as response, part.open("wb") as file:
            while piece := response.read(_PIECE_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            missing = response.length  # http.client counts down what Content-Length announced
    except urllib.error.HTTPError as error:
        raise InputError(f"{shown} cannot be fetched: HTTP {error.code}") from error
    except urllib.error.URLError as error:
        raise InputError(f"{shown} cannot be fetched: {error.reason}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise InputError(f"{shown} cannot be fetched: {type(error).__name__}") from None
    if missing:
        raise InputError(f"{shown} ended {missing} bytes too early")


def _check(path: Path) -> InputFile:
    seen: set[int] = set()  # hashes, because a job may have millions of requests
    digest, paths, mistakes = hashlib.sha256(), set[str](), list[Mistake]()
    num_requests = 0
    with path.open("rb") as file:
        stamp = _stamp(file)
        for number, line in _read_lines(file):
            digest.update(line)
            try:
                request = parse_line(line)
                if hash(request.custom_id) in seen:
                    raise InvalidLine(f"custom_id {request.custom_id[:100]!r} occurs twice")
            except InvalidLine as error:
                mistakes.append(Mistake(number, str(error)))
                if len(mistakes) == MAX_SHOWN:
                    break
                continue
            seen.add(hash(request.custom_id))
            paths.add(request.path)
            num_requests += 1
    if not num_requests and not mistakes:
        mistakes.append(Mistake(0, "the file has no requests"))
    if mistakes:
        raise InvalidInput(*mistakes)
    return InputFile(path, digest.hexdigest(), num_requests, frozenset(paths), stamp)


def _stamp(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, each with its number from 1. Raises InvalidInput for a line without end."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise InvalidInput(Mistake(number, f"it is longer than {MAX_LINE_BYTES >> 20} MiB"))
        if not line.isspace():
            yield number, line
