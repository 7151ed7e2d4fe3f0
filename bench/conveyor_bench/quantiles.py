"""Percentiles of measurements. Used by `control`."""

from collections.abc import Sequence
from statistics import quantiles


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile; 0 without values."""
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else max(values, default=0.0)
