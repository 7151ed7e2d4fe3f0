"""The program `python -m conveyor_operator`: reads settings, sets up the log, runs `process`. Start reading here.

`python -m conveyor_operator check` is a different program, which checks an installation.

Kopf and the client library take seconds to import, so they are imported after the flags have been checked.
"""

import asyncio
import logging
import signal
import sys

from conveyor_operator.settings import PROGRAM, Settings
from conveyor_process.running import end_on_sigterm, run_program

logger = logging.getLogger("conveyor_operator")


def _run(settings: Settings) -> None:
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # Kopf would log every handler call
    asyncio.run(_operate(settings))


async def _operate(settings: Settings) -> None:
    from conveyor_operator.process import run_operator

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Once Kopf runs, it handles these signals. Until then, for example while the CRD is missing, they set `stop`.
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await run_operator(settings, stop)
    logger.info("event=stopped")


def main() -> int:
    """Run the program and return its exit code."""
    if sys.argv[1:2] == ["check"]:
        from conveyor_operator.check import main as check

        return check(sys.argv[2:])
    return run_program(PROGRAM, _run)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
