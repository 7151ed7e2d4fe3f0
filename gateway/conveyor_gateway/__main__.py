"""`python -m conveyor_gateway`: the gateway's process."""

import asyncio
import sys

from conveyor_process.running import end_on_sigterm, run_program


def main() -> int:
    """Run the gateway and return its exit code."""
    import uvloop

    from conveyor_gateway.server import serve
    from conveyor_gateway.settings import PROGRAM, Settings

    def run(settings: Settings) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))

    return run_program(PROGRAM, run)


if __name__ == "__main__":
    end_on_sigterm()
    sys.exit(main())
