"""The program of a rank other than 0: loads its part of the model, and runs the steps that rank 0 runs.

Started by `ranks` in the engine process, with one end of a socket pair.
"""

import argparse
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from conveyor_engine.errors import StartError, explain_crash, one_line
from conveyor_engine.execution.build import load_rank
from conveyor_engine.logs import configure_logging
from conveyor_engine.wire.frames import encode_frame, read_payloads
from conveyor_engine.wire.ranks import BeginStep, LoadRank, RankFailed, SampleStep, ToRank, to_rank_decoder
from conveyor_engine.wire.step import RowMask, StepResult

_PROGRAM: Final = "conveyor_engine.execution.rank_process"
_log = logging.getLogger(_PROGRAM)


def _serve(messages: "SimpleQueue[ToRank]") -> None:
    """Run the steps that rank 0 runs. Raises the errors of the model and the device."""
    start = messages.get()
    assert isinstance(start, LoadRank)
    runner = load_rank(start.config, start.rank, start.meeting)
    sample: Callable[[Sequence[RowMask]], Callable[[], StepResult]] | None = None
    read: Callable[[], StepResult] | None = None
    while True:
        message = messages.get()
        if isinstance(message, BeginStep):
            sample = runner.begin(message.plan)
        elif isinstance(message, SampleStep):
            assert sample is not None
            if read is not None:
                read()  # waits for the previous step, so that this process is at most one step ahead of its device
            read = sample(message.masks)


def _receive(end: socket.socket, messages: "SimpleQueue[ToRank]") -> None:
    """Queue the messages, even while a step computes. Exits when rank 0 is gone."""
    with contextlib.suppress(OSError), end.makefile("rb") as stream:
        for message in map(to_rank_decoder.decode, read_payloads(stream)):
            messages.put(message)
    os._exit(0)


def main() -> None:
    """Run the program of a rank. It ends with `os._exit`."""
    parser = argparse.ArgumentParser(prog=f"python -m {_PROGRAM}", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    configure_logging()
    end = socket.socket(fileno=parser.parse_args().fd)
    messages: SimpleQueue[ToRank] = SimpleQueue()
    threading.Thread(target=_receive, args=(end, messages), name="reader", daemon=True).start()
    try:
        _serve(messages)
    except StartError as error:
        failed = RankFailed(error.reason, str(error))
    except Exception as error:  # the only handler for all exceptions in this process
        _log.exception("event=rank_failed")
        reason, message = explain_crash(error)
        failed = RankFailed(reason, one_line(f"a rank failed: {message}"))
    with contextlib.suppress(OSError):
        end.sendall(encode_frame(failed))
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main()
