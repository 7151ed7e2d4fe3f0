"""Ignores short gaps in the HPA's metrics, for example while an upgrade replaces the gateways. Pure.

Used by `conditions` and `desired`.
"""

from datetime import datetime, timedelta
from typing import Final

from conveyor_operator.inferenceservice.observed import AutoscalerState

_LONGEST: Final = timedelta(seconds=30)


def find_gap_end(autoscaler: AutoscalerState | None) -> datetime | None:
    """Return until when the gap counts as short; None if the HPA reads its metrics."""
    if autoscaler is None or not autoscaler.inactive_since:
        return None
    return datetime.fromisoformat(autoscaler.inactive_since) + _LONGEST


def is_short_gap(autoscaler: AutoscalerState | None, now: datetime) -> bool:
    end = find_gap_end(autoscaler)
    return end is not None and now < end
