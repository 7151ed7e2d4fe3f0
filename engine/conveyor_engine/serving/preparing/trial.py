"""Reads a tenant's headers of weights, tokenizer and template in a child process with limits. Called by `__main__`.

A tokenizer and a chat template are the work of the model's author: reading them can take any time and memory, or end
the process. After a trial the same files are read again without limits, at the same cost.
"""

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from conveyor_engine.errors import ModelError
from conveyor_engine.model_files import check_files
from conveyor_engine.serving.preparing.process import limit_cpu_seconds, limit_more_memory
from conveyor_engine.text.tokenizer import Tokenizer, read_chat_template
from conveyor_process.failure_reasons import FailureReason

TOKENIZER_CPU_SECONDS: Final = 60.0  # a vocabulary of 256,000 takes about one
FILES_CPU_SECONDS: Final = 60.0  # headers of weights have some MiB in all
TEMPLATE_CPU_SECONDS: Final = 5.0  # the longest take a tenth of one
MEMORY_BYTES: Final = 2 * 2**30
_CLOCK_TIMES: Final = 30.0  # of the CPU time may pass by the clock


def try_files(directory: Path) -> None:
    """Raises the ModelError of reading one of them, or one that names a limit."""
    if directory.is_dir():  # the tokenizer says what else it is
        run_limited(f"{directory}", lambda: check_files(directory), FILES_CPU_SECONDS)
        run_limited(f"{directory / 'tokenizer.json'}", lambda: Tokenizer(directory), TOKENIZER_CPU_SECONDS)
        run_limited("the model's chat template", lambda: _compile(directory), TEMPLATE_CPU_SECONDS)


def _compile(directory: Path) -> None:
    template = read_chat_template(directory)
    if template is not None:
        template.compile()


def run_limited(what: str, load: Callable[[], object], cpu_seconds: float) -> None:
    """Calls `load` in a forked child process. Raises its ModelError, or one that names the limit that it broke."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(load, writer, cpu_seconds)
    os.close(writer)
    try:
        said = _read(reader, _CLOCK_TIMES * cpu_seconds)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # it has ended, or is late
        status = os.waitpid(pid, 0)[1]
    if said is None:
        raise ModelError(f"{what} takes more than {_CLOCK_TIMES * cpu_seconds:g} s to read")
    if said:
        content = json.loads(said)
        raise ModelError(content["message"], reason=FailureReason(content["reason"]))
    if os.waitstatus_to_exitcode(status) != 0:
        limits = f"{cpu_seconds:g} s of CPU time or {MEMORY_BYTES >> 30} GiB of memory"
        raise ModelError(f"{what} takes more than {limits} to read, or ends the process that reads it")


def _read(reader: int, seconds: float) -> bytes | None:
    """What the child says until it ends; None if it does not end in time."""
    end, said = time.monotonic() + seconds, b""
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (data := os.read(reader, 2**16)):
            return said
        said += data
    return None


def _run(load: Callable[[], object], writer: int, cpu_seconds: float) -> NoReturn:
    """The child process: it says nothing if all is well."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["RUST_BACKTRACE"] = "0"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a thread for each CPU takes address space
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_cpu_seconds(cpu_seconds)
        limit_more_memory(MEMORY_BYTES)
        load()
        code = 0
    except ModelError as error:
        os.write(writer, json.dumps({"reason": error.reason, "message": str(error)}).encode())
    finally:
        os._exit(code)
