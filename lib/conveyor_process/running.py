"""Runs a program: reads settings, sets up the log, runs the work, returns the exit code. Called by each `__main__`."""

import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

from conveyor_process.log import LogFormat, set_up_log
from conveyor_process.settings import Program, SettingsError


class LoggedSettings(Protocol):
    """The settings that every program has."""

    @property
    def log_level(self) -> str: ...

    @property
    def log_format(self) -> LogFormat: ...


S = TypeVar("S", bound=LoggedSettings)


def run_program(program: Program[S], run: Callable[[S], None]) -> int:
    """Run a program. Returns its exit code: 0 when `run` returns, 1 after an error, 2 for invalid settings.

    Errors other than SettingsError are logged.
    """
    try:
        settings = program.parse(sys.argv[1:], os.environ)
        set_up_log(settings.log_level, settings.log_format)
        gc.freeze()  # the garbage collector need not scan imported objects
        run(settings)
    except SettingsError as error:
        with contextlib.suppress(OSError):
            print(f"python -m {program.module}: {error}", file=sys.stderr)
        return 2
    except Exception:
        logging.getLogger(program.module).exception("event=failed")
        return 1
    finally:
        drop_unwritten()
    return 0


def end_on_sigterm() -> None:
    """End the process with code 143 on SIGTERM, until the program has its own handler. Called before slow imports.

    If the first process of a container has no handler for a signal, the kernel drops the signal. A pod that is deleted
    while its program starts would then run for its whole termination grace period.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def drop_unwritten() -> None:
    """Drop buffered output that cannot be written. Otherwise, on a full disk, Python would exit with code 120.

    `logging` itself drops log lines that cannot be written.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
