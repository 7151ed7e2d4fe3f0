"""Tests a log that cannot be written, because the disk is full (/dev/full) or nobody reads the pipe any more."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

EXAMPLE = """
import logging, os, sys
from dataclasses import dataclass
from conveyor_process.kinds import LOG_FORMAT, LOG_LEVEL
from conveyor_process.running import run_program
from conveyor_process.settings import Program, setting

@dataclass
class Settings:
    log_level: str = setting("INFO", "least level", LOG_LEVEL)
    log_format: str = setting("logfmt", "form", LOG_FORMAT)

def work(settings):
    for number in range(1000):
        logging.getLogger("conveyor_process").info("event=worked number=%d", number)
    print("a library's words")
    os.write(int(os.environ["WORK"]), b"done")
    if settings.log_level == "DEBUG":
        raise RuntimeError("it broke")

sys.exit(run_program(Program("conveyor_example", "An example.", Settings), work))
"""


@contextmanager
def opened(kind: str) -> Iterator[int]:
    """Open a descriptor to which nothing can be written."""
    if kind == "full":
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, descriptor = os.pipe()
        os.close(reading)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("kind", ["full", "closed"])
@pytest.mark.parametrize(("flags", "code", "message"), [([], 0, "done"), (["DEBUG"], 1, "done"), (["loud"], 2, "")])
def test_a_log_that_cannot_be_written_changes_neither_the_work_nor_its_exit_code(
    kind: str, flags: list[str], code: int, message: str
) -> None:
    with opened(kind) as descriptor:
        reading, writing = os.pipe()
        command = [sys.executable, "-c", EXAMPLE, *(f"--log-level={flag}" for flag in flags)]
        variables = {**os.environ, "WORK": str(writing), "PYTHONUNBUFFERED": ""}
        found = subprocess.run(
            command, stdout=descriptor, stderr=descriptor, env=variables, pass_fds=[writing], check=False, timeout=100
        )
        os.close(writing)
        with open(reading) as work:
            assert work.read() == message
    assert found.returncode == code
