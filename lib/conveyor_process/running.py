"""A program from its first line to its last: settings, log, work, exit code. Called by each `__main__`."""

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
    """The exit code: 0 when `run` returns, 1 after an error, 2 for settings that cannot be used.

    Has the one broad `except` of the process.
    """
    try:
        settings = program.parse(sys.argv[1:], os.environ)
        set_up_log(settings.log_level, settings.log_format)
        gc.freeze()  # what is imported stays, and need not be looked at again and again
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
    """Ends the process with code 143 on SIGTERM, until the program has its own handler. Called before slow imports.

    The kernel drops signals for the first process of a container that have no handler. A pod that is deleted while its
    program starts would then run for its whole termination grace period.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def drop_unwritten() -> None:
    """Drops what standard output and error do not take: on a full disk Python would end with code 120, whatever it did.

    A log line that cannot be written is dropped by `logging` itself.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
