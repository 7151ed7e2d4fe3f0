"""`python -m conveyor_jobs`: the process of one offline job."""

import signal
import sys

from conveyor_process.running import end_on_sigterm, run_program


def main() -> int:
    """Run the job and return its exit code: see `job.ExitCode`, and `run_program` for the others."""
    from conveyor_jobs.job import run_job
    from conveyor_jobs.settings import PROGRAM, Settings

    def run(settings: Settings) -> None:
        if code := run_job(settings):
            sys.exit(code)

    return run_program(PROGRAM, run)


if __name__ == "__main__":
    end_on_sigterm()
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
