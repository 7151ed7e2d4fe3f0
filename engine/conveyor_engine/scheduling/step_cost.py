"""Fits the current cost of a step on this device: base + per_row x rows + per_token x further tokens.

Used by `speculation`, and by `objectives` (`steering` and `candidates`).

Further tokens are those of prompts, and drafts. Steps of one shape (rows and further tokens between the same powers of
two) are one point, at the medians of the newest steps. So neither frequent shapes nor single slow steps dominate the
fit. Pure.
"""

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Final, NamedTuple

NUM_KEPT: Final = 16  # steps of one shape
NUM_STEPS_FRESH: Final = 4096  # a shape that was not seen for this many steps is dropped
_RIDGE: Final = 1e-3  # relative to a term's sum of squares; limits the coefficients if points are nearly collinear
_SMOOTHING: Final = 1 / 8


class Coefficients(NamedTuple):
    """The coefficients in seconds. None of them is negative."""

    base: float
    per_row: float
    per_token: float

    def seconds(self, num_rows: float, prompt_tokens: float) -> float:
        """Return the predicted seconds of a step."""
        return self.base + self.per_row * num_rows + self.per_token * prompt_tokens


class _Shape:
    """The newest steps of one shape, and their medians."""

    __slots__ = ("_point", "last_seen", "steps")

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int, float]] = deque(maxlen=NUM_KEPT)
        self.last_seen = 0
        self._point: tuple[float, float, float] | None = None

    def add(self, step: tuple[int, int, float], number: int) -> None:
        self.steps.append(step)
        self.last_seen = number
        self._point = None

    @property
    def point(self) -> tuple[float, float, float]:
        if self._point is None:
            rows, tokens, seconds = zip(*self.steps, strict=True)
            self._point = median(rows), median(tokens), median(seconds)
        return self._point


class StepCost:
    """Fits the coefficients to the observed steps."""

    def __init__(self, smoothing: float = _SMOOTHING) -> None:
        """smoothing: the weight of each new fit after the first one."""
        self._smoothing = smoothing
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._number = 0
        self.coefficients: Coefficients | None = None  # None: nothing was fitted yet

    def observe(self, num_rows: int, prompt_tokens: int, seconds: float) -> None:
        """Record how long a step took."""
        self._number += 1
        shape = self._shapes.setdefault((num_rows.bit_length(), prompt_tokens.bit_length()), _Shape())
        shape.add((num_rows, prompt_tokens, seconds), self._number)

    def fit(self) -> None:
        """Move the coefficients towards the best fit. The first fit is not smoothed."""
        oldest = self._number - NUM_STEPS_FRESH
        self._shapes = {key: shape for key, shape in self._shapes.items() if shape.last_seen > oldest}
        points = [shape.point for shape in self._shapes.values() if shape.point[2] > 0]
        if not points:
            return
        found = _fit_best(points)
        if self.coefficients is None:
            self.coefficients = found
            return
        pairs = zip(self.coefficients, found, strict=True)
        self.coefficients = Coefficients(*(old + self._smoothing * (new - old) for old, new in pairs))


def _fit_best(points: Sequence[tuple[float, float, float]]) -> Coefficients:
    """Return the fit with the smallest sum of squared relative errors, over all subsets of terms.

    Fits with a negative coefficient are excluded.
    """
    rows = [(1 / seconds, num_rows / seconds, tokens / seconds) for num_rows, tokens, seconds in points]
    sums = [sum(row[i] for row in rows) for i in range(3)]
    products = [[sum(row[i] * row[j] for row in rows) for j in range(3)] for i in range(3)]
    subsets = (terms for size in (3, 2, 1) for terms in combinations(range(3), size))
    found = [each for terms in subsets if (each := _solve(products, sums, terms)) is not None]
    return min(found, key=lambda each: _error(products, sums, each))


def _error(products: list[list[float]], sums: list[float], found: Coefficients) -> float:
    """Return the sum of the squared relative errors, minus the number of points, which is equal for all fits."""
    square = sum(found[i] * found[j] * products[i][j] for i in range(3) for j in range(3))
    return square - 2 * sum(each * total for each, total in zip(found, sums, strict=True))


def _solve(products: list[list[float]], sums: list[float], terms: tuple[int, ...]) -> Coefficients | None:
    """Solve the normal equations with a ridge by elimination.

    Returns None if a coefficient is negative, or if a term is 0 in all points.
    """
    matrix = [[*(products[i][j] for j in terms), sums[i]] for i in terms]
    size = len(terms)
    for i in range(size):
        matrix[i][i] *= 1 + _RIDGE
        if matrix[i][i] <= 0:
            return None
    for i in range(size):  # positive definite: no pivots are needed
        for below in matrix[i + 1 :]:
            share = below[i] / matrix[i][i]
            below[i:] = [value - share * above for value, above in zip(below[i:], matrix[i][i:], strict=True)]
    found = [0.0, 0.0, 0.0]
    for i in reversed(range(size)):
        known = sum(matrix[i][j] * found[terms[j]] for j in range(i + 1, size))
        found[terms[i]] = (matrix[i][size] - known) / matrix[i][i]
    return None if min(found) < 0 else Coefficients(*found)
