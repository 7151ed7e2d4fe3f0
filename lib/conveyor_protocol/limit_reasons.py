"""The reasons for the limit of requests that an engine with objectives runs at once: `limit_reason` of `GET /load`.

The engine writes it, gateways and the metrics server forward it, and `kubectl conveyor explain` shows it.
"""

from enum import StrEnum
from typing import Final


class LimitReason(StrEnum):
    """The reason for a limit. docs/objectives.md explains each."""

    DECLARED = "declared"
    PREDICTED = "predicted"
    MISSED = "missed"
    SLACK = "slack"
    UNREACHABLE = "unreachable"


MEANINGS: Final = {
    LimitReason.DECLARED: "nothing asks for less",
    LimitReason.PREDICTED: "steps at the limits before would have taken too long",
    LimitReason.MISSED: "the P95 was above the objective",
    LimitReason.SLACK: "requests waited, and there was room",
    LimitReason.UNREACHABLE: "no limits hold the objective, so the declared ones stay",
}
