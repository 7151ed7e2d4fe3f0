"""The files with a job's results, which are also its memory. Called by `job`.

    output.jsonl   the good responses, one per line, in the order in which they arrived
    errors.jsonl   the other requests, each with its error response or with the reason why it has none
    batch.json     the job's state, in the form of OpenAI's Batch object; `input_sha256` tells which input it belongs to
    lock           held by the process that writes here

Lines have OpenAI's format. The number in a result's `id` is the number of its request in the input, so a job that is
started again finds out what is left. A result counts once its line is on the disk: `sync` before a job ends. If a
process is killed before that, the request is sent again, so each request has one result, whatever happens.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Self

import msgspec

from conveyor_jobs.request import BatchRequest
from conveyor_jobs.sending import MAX_ANSWER_BYTES, Response

OUTPUT: Final = "output.jsonl"
ERRORS: Final = "errors.jsonl"
STATE: Final = "batch.json"
_LOCK: Final = "lock"
_ID: Final = "batch_req_"
_EXPIRED: Final = "batch_expired"
_MAX_TEXT_BYTES: Final = 64 << 10  # kept of a body that is no JSON, of which escapes may make six times as much
_MAX_LINE_BYTES: Final = MAX_ANSWER_BYTES + (1 << 20)


class ResultsError(Exception):
    """The folder cannot be used for the results of this job. The message says why and what to do."""


class FolderHeld(Exception):
    """Another process writes to the folder."""


@dataclass(slots=True)
class Counts:
    """How many requests have a result, and the tokens that the good responses report."""

    completed: int = 0
    failed: int = 0
    expired: int = 0  # those of the failed ones that had no response when the window ended
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None  # a response with another number is not counted


class _Details(msgspec.Struct):
    cached_tokens: _Tokens = None
    reasoning_tokens: _Tokens = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens = None
    completion_tokens: _Tokens = None
    input_tokens: _Tokens = None  # in /v1/responses and /v1/messages
    output_tokens: _Tokens = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    code: str = ""


class _Result(msgspec.Struct):
    id: str
    response: _Answer | None = None
    error: _Error | None = None


class _State(msgspec.Struct):
    """What a job that is started again reads of its state."""

    status: str
    created_at: int
    input_sha256: str


class Results:
    """The results of one job with `num_requests` requests. Closes its files at the end of the `with` block."""

    def __init__(self, folder: Path, num_requests: int) -> None:
        self._folder = folder
        self._done = bytearray(num_requests)
        self._files: dict[str, BinaryIO] = {}
        self._closing = contextlib.ExitStack()
        self._failure: OSError | None = None
        self.counts = Counts()

    def __enter__(self) -> Self:
        """Open the files, and find what is done. Raises ResultsError."""
        with contextlib.ExitStack() as stack:
            for name in (OUTPUT, ERRORS):
                self._files[name] = stack.enter_context((self._folder / name).open("a+b"))
                self._recover(name)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def _recover(self, name: str) -> None:
        """Read the results that are there. A line that a killed process did not finish is removed."""
        file = self._files[name]
        file.seek(0)
        end = 0
        while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
            try:
                result = msgspec.json.decode(line, type=_Result)
                number = int(result.id.removeprefix(_ID))
                if not 0 <= number < len(self._done) or self._done[number]:
                    raise ValueError
            except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
                path = self._folder / name
                raise ResultsError(
                    f"{path} has a line at byte {end} that is no result of this job, or occurs twice"
                ) from None
            self._done[number] = 1
            self._count(name, b"" if result.response is None else bytes(result.response.body))
            self.counts.expired += result.error is not None and result.error.code == _EXPIRED
            end += len(line)
        file.truncate(end)

    def is_done(self, number: int) -> bool:
        return bool(self._done[number])

    def add(self, number: int, request: BatchRequest, response: Response) -> None:
        """Add the result of a request that got a response, or that no attempt got one for."""
        answer = error = None
        body = _write_in_one_line(response.body)
        if response.status:
            request_id = _make_writable(response.request_id)
            answer = {"status_code": response.status, "request_id": request_id, "body": body}
        else:
            error = {"code": "no_response", "message": _make_writable(response.error)}
        name = OUTPUT if response.is_good and isinstance(body, msgspec.Raw) else ERRORS
        self._write(name, number, request, answer, error)
        self._count(name, response.body)

    def add_expired(self, number: int, request: BatchRequest) -> None:
        """Add the result of a request that had no response when the job's window ended."""
        error = {"code": _EXPIRED, "message": "the job's completion window ended before its response"}
        self._write(ERRORS, number, request, None, error)
        self._count(ERRORS, b"")
        self.counts.expired += 1

    def _write(self, name: str, number: int, request: BatchRequest, response: object, error: object) -> None:
        result = {"id": f"{_ID}{number}", "custom_id": request.custom_id, "response": response, "error": error}
        with self._writing():
            self._files[name].write(msgspec.json.encode(result) + b"\n")
        self._done[number] = 1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raise the first error of the disk again from then on: a line after a half line would break the file."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as error:
            self._failure = error
            raise

    def _count(self, name: str, body: bytes) -> None:
        if name == ERRORS:
            self.counts.failed += 1
            return
        self.counts.completed += 1
        try:
            usage = msgspec.json.decode(body, type=_Body).usage or _Usage()
        except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
            return
        details_of_input = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
        details_of_output = usage.completion_tokens_details or usage.output_tokens_details or _Details()
        self.counts.input_tokens += (usage.prompt_tokens or 0) + (usage.input_tokens or 0)
        self.counts.cached_tokens += details_of_input.cached_tokens or 0
        self.counts.output_tokens += (usage.completion_tokens or 0) + (usage.output_tokens or 0)
        self.counts.reasoning_tokens += details_of_output.reasoning_tokens or 0

    def flush(self) -> None:
        """Give what was added to the operating system."""
        with self._writing():
            for file in self._files.values():
                file.flush()

    def sync(self) -> None:
        """Wait until what was flushed is on the disk. Takes long, so it may run in another thread."""
        for file in self._files.values():
            os.fsync(file.fileno())


def _write_in_one_line(body: bytes) -> msgspec.Raw | str:
    """Return a response's JSON without line breaks. If it is not JSON, return the beginning of its text."""
    try:
        body.decode()
        return msgspec.Raw(msgspec.json.format(body, indent=-1))
    except (ValueError, RecursionError):
        text = body[:_MAX_TEXT_BYTES].decode(errors="replace")
        return text if len(body) <= _MAX_TEXT_BYTES else f"{text}... ({len(body)} bytes in all)"


def _make_writable(text: str) -> str:
    """Return the text without what UTF-8 cannot encode. aiohttp decodes other bytes of headers so."""
    return text.encode(errors="replace").decode()


def hold_lock(folder: Path) -> BinaryIO:
    """Return the locked file. While it is open, no other process can lock it. Raises FolderHeld."""
    file = (folder / _LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise FolderHeld(f"another process writes to {folder}, or its disk has no locks ({error})") from None
    return file


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Replace the job's state, at once and on the disk."""
    part = folder / f"{STATE}.part"
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.rename(folder / STATE)


def read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state that an earlier start of the job wrote; None without one. Raises ResultsError."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        content = path.read_bytes()
        msgspec.json.decode(content, type=_State)
        state: dict[str, Any] = msgspec.json.decode(content)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{path} is not the state of a job: {error}") from None
    return state
