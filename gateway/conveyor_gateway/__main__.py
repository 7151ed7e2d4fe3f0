"""`python -m conveyor_gateway`: the gateway's process."""

import sys

from conveyor_process.event_loop import run
from conveyor_process.running import end_on_sigterm, run_program


def main() -> int:
    """Run the gateway and return its exit code."""
    from conveyor_gateway.server import serve
    from conveyor_gateway.settings import PROGRAM, Settings

    def serve_until_stopped(settings: Settings) -> None:
        run(serve(settings))

    return run_program(PROGRAM, serve_until_stopped)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
