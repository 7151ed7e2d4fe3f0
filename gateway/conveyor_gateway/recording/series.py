"""Counters and histograms by labels, and Prometheus' text format for them, written piece by piece. Pure.

Used by `metrics`. With prometheus_client's own classes, a page with many services takes seconds in one turn of the
event loop, and the removal of one service reads the series of all others (ADR 125).
"""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final, Generic, TypeVar

LINES_A_PIECE: Final = 500
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class Counter:
    """One counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Histogram:
    """One histogram. `bounds`: the upper bounds of its buckets, ascending; the last bucket has none."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


Series = TypeVar("Series", Counter, Histogram)


class Family(ABC, Generic[Series]):
    """All series of one name, by the values of their labels."""

    kind: str

    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        self.name, self._text, self._labels = name, text, labels
        self._series: dict[tuple[str, ...], Series] = {}

    def find(self, values: tuple[str, ...]) -> Series | None:
        return self._series.get(values)

    def add(self, values: tuple[str, ...]) -> Series:
        series = self._series[values] = self._build()
        return series

    def remove(self, values: tuple[str, ...]) -> None:
        """Remove the series with these values, if it exists."""
        self._series.pop(values, None)

    def write(self) -> Iterator[bytes]:
        """Yield the text. Series may be added and removed between two pieces."""
        lines = (
            line
            for values, series in list(self._series.items())
            for line in self._write(write_labels(self._labels, values), series)
        )
        return write_family(self.name, self._text, self.kind, lines)

    @abstractmethod
    def _build(self) -> Series:
        """Return a new series."""

    @abstractmethod
    def _write(self, labels: str, series: Series) -> Iterator[str]:
        """Yield the lines of a series."""


class Counters(Family[Counter]):
    """The name ends with `_total`, as Prometheus names counters."""

    kind = "counter"

    def _build(self) -> Counter:
        return Counter()

    def _write(self, labels: str, series: Counter) -> Iterator[str]:
        yield f"{self.name}{{{labels}}} {series.value!r}\n"


class Histograms(Family[Histogram]):
    kind = "histogram"

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        super().__init__(name, text, labels)
        self._bounds = bounds
        self._names = [*(repr(float(bound)) for bound in bounds), "+Inf"]

    def _build(self) -> Histogram:
        return Histogram(self._bounds)

    def _write(self, labels: str, series: Histogram) -> Iterator[str]:
        sum_of_values = series.sum
        counts = list(accumulate(series.counts))
        for bound, count in zip(self._names, counts, strict=True):
            yield f'{self.name}_bucket{{{labels},le="{bound}"}} {count}\n'
        yield f"{self.name}_count{{{labels}}} {counts[-1]}\n"
        yield f"{self.name}_sum{{{labels}}} {sum_of_values!r}\n"


def write_labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))


def write_family(name: str, text: str, kind: str, lines: Iterable[str]) -> Iterator[bytes]:
    """Yield the text of a family in pieces of at most LINES_A_PIECE of its lines."""
    piece = [f"# HELP {name} {text}\n# TYPE {name} {kind}\n"]
    for line in lines:
        piece.append(line)
        if len(piece) >= LINES_A_PIECE:
            yield "".join(piece).encode()
            piece.clear()
    yield "".join(piece).encode()
