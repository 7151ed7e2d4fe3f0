"""The worker processes that turn bodies into engine requests, with limits on CPU time and memory.

A client can choose a body that needs much time or memory: to parse it, to render it with the model's chat template (a
program by the model's author), or to tokenize it. Therefore workers do this, and `pool` sends them jobs. A job
that exceeds a limit is rejected. A fork server forks the workers, so they share the tokenizer's memory. The fork server
itself is forked before the API process has threads, an event loop or clients.
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import msgspec

from conveyor_engine import registry
from conveyor_engine.errors import ErrorCode, InvalidRequest, ModelError, RequestError
from conveyor_engine.limited import limit_cpu_seconds, limit_more_memory, peak_bytes
from conveyor_engine.serving.preparing.jobs import FilesWanted, ServedModel, find_kind
from conveyor_engine.wire.frames import encode_frame, read_payloads
from conveyor_engine.wire.worker import Bug, Failure, Job, Reply, Started, Wanted, job_decoder

CPU_SECONDS = 1.0  # the CPU limit for a job; the job's kind and CPU_SECONDS_PER_MIB add to it
CPU_SECONDS_PER_MIB = 1.0  # added for each MiB of the body and of its fetched files; several times what these need
SECONDS_PER_CPU_SECOND = 10.0  # deadline / CPU limit: a job may wait for a CPU, or for memory to be paged in
MEMORY_BYTES = 96 * 2**20  # memory that a job may allocate; the job's kind and the next two constants add to it
MEMORY_BYTES_PER_TOKEN = 512  # added for each token of the context length; tokenizing takes 110 bytes per character
# Added for each byte of the body. A body of empty lists needs 25, and MEMORY_BYTES covers the other 9 up to 10 MiB.
MEMORY_BYTES_PER_BODY_BYTE = 16
_RETIRE_BYTES = 32 * 2**20  # a worker that grew by more than this is replaced
_NICENESS = 5  # tokens of running streams take precedence over prompts of new ones
_encode = msgspec.msgpack.Encoder().encode
_log = logging.getLogger(__name__)
LoadReader = Callable[[], Any]


def cpu_seconds(job: Job) -> float:
    """Return the CPU time that the job may take."""
    return CPU_SECONDS + find_kind(job).cpu_seconds + CPU_SECONDS_PER_MIB * job.num_bytes / 2**20


def deadline_seconds(job: Job) -> float:
    """Return the seconds within which a worker must reply to the job or use CPU time. Otherwise it is stuck."""
    return SECONDS_PER_CPU_SECOND * cpu_seconds(job)


def used_cpu_seconds(pid: int | None) -> float:
    """Return the CPU time that a process has used, or 0 if there is none with this pid.

    The clock's number is that of clock_getcpuclockid(3), which Python lacks.
    """
    try:
        return 0.0 if pid is None else time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def too_costly(job: Job) -> InvalidRequest:
    """Return the error for a job that ran out of CPU time or memory."""
    kind = find_kind(job)
    return InvalidRequest(
        f"this request could not be {kind.reading} within the CPU time ({CPU_SECONDS + kind.cpu_seconds:g} s, and "
        f"{CPU_SECONDS_PER_MIB:g} s for each MiB) and the memory that it may take; {kind.advice}",
        code=ErrorCode.PROMPT_TOO_COSTLY,
    )


class ForkServer:
    """The API process's side of the process that forks workers."""

    def __init__(self, model: ServedModel, load_reader: LoadReader | None = None) -> None:
        """Fork the fork server. Call this while the process has one thread and no event loop.

        load_reader: called in the fork server to load the model's reader, which all workers share.
        """
        self.model = model
        for task in registry.find_packages():
            registry.load(task, "preparing")  # imported before the forks, so that workers share its memory
        self._control, theirs = socket.socketpair()
        if os.fork() == 0:
            self._control.close()
            _exit_after(lambda: _fork_workers(theirs, model, load_reader))
        theirs.close()

    def close(self) -> None:
        """End the fork server. Its workers run until their sockets are closed."""
        self._control.close()

    def start_worker(self) -> socket.socket:
        """Start a worker and return its socket. The worker exits when the socket is closed.

        Raises OSError if the fork server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"w"], [theirs.fileno()])
        return ours


def _exit_after(work: Callable[[], None]) -> NoReturn:
    """Run `work`, then exit without the clean-up that belongs to the parent process."""
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _fork_workers(control: socket.socket, model: ServedModel, load_reader: LoadReader | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the server only
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers
    if load_reader is not None:
        model = replace(model, reader=_load(load_reader))
    gc.freeze()  # the collector would write to the memory that workers share
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=fds[0]) as connection:
            if os.fork() == 0:
                control.close()
                _exit_after(lambda: _work(connection, model))


def _load(load_reader: LoadReader) -> Any:
    """Load the reader without torch, which would take 0.7 GiB and 5 s more.

    Returns None if the files are invalid. The engine process loads the same files and reports the error, so no request
    arrives then.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # transformers then runs without torch
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # transformers would advise installing torch
    try:
        return load_reader()
    except ModelError as error:
        _log.error("event=reader_not_loaded message=%s", error)
        return None


def _work(connection: socket.socket, model: ServedModel) -> None:
    """Run one worker until its socket closes or it has grown too large."""
    os.nice(_NICENESS)
    signal.signal(signal.SIGPROF, _raise_out_of_time)
    os.environ["RUST_BACKTRACE"] = "0"  # tokenizers aborts when out of memory, and would print a backtrace
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread for each CPU would not fit into a job's memory
    peak = peak_bytes()
    connection.sendall(encode_frame(Started(os.getpid())))
    with connection.makefile("rb") as received:
        for payload in read_payloads(received):
            result = _prepare_within_limits(payload, model)
            retires = peak_bytes() - peak > _RETIRE_BYTES
            connection.sendall(encode_frame(Reply(result, retires)))
            if retires:
                return


class _OutOfTime(BaseException):
    """Raised when a job's CPU time is used up. Not an Exception, so that no `except Exception` catches it."""


def _raise_out_of_time(_: int, __: FrameType | None) -> None:
    raise _OutOfTime


def _prepare_within_limits(payload: bytes, model: ServedModel) -> bytes | Failure | Bug | Wanted:
    """Prepare the encoded job. A signal interrupts Python code; the kernel's limit, 2 s later, ends native code."""
    job = job_decoder.decode(payload)
    seconds = cpu_seconds(job)
    limit_cpu_seconds(seconds + 2)
    num_bytes = MEMORY_BYTES + MEMORY_BYTES_PER_TOKEN * job.facts.max_model_len
    num_bytes += find_kind(job).memory_bytes
    limit_more_memory(num_bytes + MEMORY_BYTES_PER_BODY_BYTE * len(job.body))
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            return _prepare(job, model)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (_OutOfTime, MemoryError):
        return Failure.of(too_costly(job))


def _prepare(job: Job, model: ServedModel) -> bytes | Failure | Bug | Wanted:
    try:
        return _encode(find_kind(job).prepare(replace(model, adapters=job.adapters, fetched=job.fetched), job))
    except FilesWanted as wanted:
        return Wanted(wanted.names)
    except RequestError as error:
        return Failure.of(error)
    except MemoryError:
        raise
    except Exception as error:  # the one broad except of this process
        return Bug(f"{type(error).__name__}: {error}")
