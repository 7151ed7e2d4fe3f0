"""`python -m conveyor_metrics`: the process of the metrics API."""

import asyncio
import sys

from conveyor_process.running import end_on_sigterm, run_program


def main() -> int:
    """Run the metrics server and return its exit code."""
    from conveyor_metrics.server import serve
    from conveyor_metrics.settings import PROGRAM, Settings

    def run(settings: Settings) -> None:
        asyncio.run(serve(settings))

    return run_program(PROGRAM, run)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
