"""`python -m conveyor_console`: the process of the console."""

import asyncio
import sys

from conveyor_process.running import end_on_sigterm, run_program


def main() -> int:
    """Run the console and return its exit code."""
    from conveyor_console.server import serve
    from conveyor_console.settings import PROGRAM, Settings

    def run(settings: Settings) -> None:
        asyncio.run(serve(settings))

    return run_program(PROGRAM, run)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
