"""`python -m conveyor_gateway`: the gateway's process."""

import asyncio
import sys

import uvloop

from conveyor_gateway.server import serve
from conveyor_gateway.settings import PROGRAM, Settings
from conveyor_process.running import run_program


def _run(settings: Settings) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


def main() -> int:
    """The exit code."""
    return run_program(PROGRAM, _run)


if __name__ == "__main__":
    sys.exit(main())
