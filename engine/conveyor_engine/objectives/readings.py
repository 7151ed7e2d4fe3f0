"""Collects the measured times for one objective since the limits last changed. Used by `steering`. Pure."""

from collections import deque
from typing import Final

ENOUGH_STEPS: Final = 24  # readings of steps that are needed for a P95
ENOUGH_REQUESTS: Final = 64  # readings of single requests that are needed for a P95; they vary more than steps
_NUM_KEPT: Final = 256
_SHARE: Final = 0.95
FIRST_FACTOR: Final = 0.9  # leaves a margin, because steps differ from the fit


class Readings:
    """The newest readings. Each may count for several requests. Limits are chosen for `factor` times the objective."""

    def __init__(self, objective_seconds: float, num_enough: int) -> None:
        self.objective_seconds = objective_seconds
        self.factor = FIRST_FACTOR
        self._num_enough = num_enough
        self._readings: deque[tuple[float, int]] = deque(maxlen=_NUM_KEPT)

    def add(self, seconds: float, num_requests: int = 1) -> None:
        self._readings.append((seconds, num_requests))

    def clear(self) -> None:
        """Remove all readings, because the limits have changed."""
        self._readings.clear()

    @property
    def target_seconds(self) -> float:
        """Return the time that predictions for new limits should not exceed: `factor` times the objective."""
        return self.factor * self.objective_seconds

    def find_ratio(self) -> float | None:
        """Return the P95 divided by the objective; None while there are too few readings."""
        p95 = self._find_p95()
        return None if p95 is None else p95 / self.objective_seconds

    def _find_p95(self) -> float | None:
        if len(self._readings) < self._num_enough:
            return None
        left = (1 - _SHARE) * sum(number for _, number in self._readings)
        for seconds, number in sorted(self._readings, reverse=True):
            left -= number
            if left < 0:
                return seconds
        return 0.0
