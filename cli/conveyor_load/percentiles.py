"""The percentile of all figures: of load runs, measurements and the demo. Pure."""

from collections.abc import Iterable


def percentile(values: Iterable[float], percent: int) -> float:
    """Return the smallest value that at least `percent` % of the values do not exceed; 0 without values."""
    in_order = sorted(values)
    return in_order[max(0, -(-len(in_order) * percent // 100) - 1)] if in_order else 0.0
