"""Why an engine with objectives runs the requests together that it does: `limit_reason` of `GET /load`.

Written by the engine, passed on by gateways and the metrics server, told by `kubectl conveyor explain`.
"""

from enum import StrEnum
from typing import Final


class LimitReason(StrEnum):
    """docs/objectives.md has them too."""

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
