"""`python -m conveyor_metrics`: the process of the metrics API."""

import asyncio
import sys

from conveyor_metrics.server import serve
from conveyor_metrics.settings import PROGRAM, Settings
from conveyor_process.running import run_program


def _run(settings: Settings) -> None:
    asyncio.run(serve(settings))


def main() -> int:
    """The exit code."""
    return run_program(PROGRAM, _run)


if __name__ == "__main__":
    sys.exit(main())
