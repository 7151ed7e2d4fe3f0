"""How a job ends: its exit codes, and how many failed requests are too many. Pure. Called by `job`."""

import signal
from dataclasses import dataclass
from enum import IntEnum
from typing import Final


class ExitCode(IntEnum):
    """The exit codes of a job. `conveyor_process.running` has those of a program that cannot start."""

    DONE = 0  # every request has a result, and no more of them failed than may fail
    FAILED = 1  # the disk, the network, the key, or another process in the folder; another start may help
    INVALID = 2  # the settings, the class, the input or the output folder; another start would end in the same way
    EXPIRED = 3  # the completion window ended; requests without a response have expired
    TOO_MANY_FAILED = 4  # every request has a result; more of them failed than `max_failed` allows
    STOPPED = 128 + signal.SIGTERM  # another start continues


COMPLETED: Final = "completed"
EXPIRED: Final = "expired"
FINAL: Final = frozenset((COMPLETED, EXPIRED))  # the states of a job that has ended


@dataclass(frozen=True, slots=True)
class MaxFailed:
    """How many requests of a job may fail: a number, or a percentage of all requests."""

    value: int
    is_percentage: bool = False

    def allows(self, num_failed: int, num_requests: int) -> bool:
        if self.is_percentage:
            return num_failed * 100 <= self.value * num_requests
        return num_failed <= self.value


def choose_exit_code(status: str, num_failed: int, num_requests: int, limit: MaxFailed | None) -> ExitCode:
    """Return the exit code of a job whose state is `status`. Without a limit, one request has to succeed."""
    if status not in FINAL:
        return ExitCode.STOPPED
    if status == EXPIRED:
        return ExitCode.EXPIRED
    limit = limit or MaxFailed(num_requests - 1)
    return ExitCode.DONE if limit.allows(num_failed, num_requests) else ExitCode.TOO_MANY_FAILED
