"""Why an engine with objectives limits how many requests it runs at once: `limit_reason` of `GET /load`.

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
    LimitReason.DECLARED: "nothing requires lower limits",
    LimitReason.PREDICTED: "steps at the earlier limits would have taken too long",
    LimitReason.MISSED: "the P95 was above the objective",
    LimitReason.SLACK: "requests waited, and the latency allowed more",
    LimitReason.UNREACHABLE: "no limits meet the objective, so the declared limits are used",
}
