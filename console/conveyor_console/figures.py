"""Computes latencies and rates of a service's engines from two reads of their metrics. Pure.

Engines report totals since their start. The figures are those of the time between the newest read and one that is
_WINDOW_SECONDS to twice as old, for each engine. An engine that has restarted, or that was not read before, counts from
its next read on.
"""

from dataclasses import dataclass, field
from typing import Final

from conveyor_insight.traffic import Histogram, Traffic, read_traffic

_WINDOW_SECONDS: Final = 30.0
_KEPT_SECONDS: Final = 180.0  # of an engine that no longer answers
PERCENTILE: Final = 95


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of some seconds. None: no request ended in this time, or the engines do not report it."""

    first_token_seconds: float | None = None
    """Of tasks that take one step: the time to the result."""
    between_tokens_seconds: float | None = None
    tokens_per_second: float | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use, 0 to 1, of the engine that uses most."""


@dataclass(slots=True)
class _Reads:
    """The reads of one engine that are kept: the newest, and two older ones."""

    newest: tuple[float, Traffic]
    middle: tuple[float, Traffic]
    oldest: tuple[float, Traffic]

    def add(self, traffic: Traffic, now: float) -> None:
        self.newest = now, traffic
        if _has_restarted(self.middle[1], traffic):
            self.middle = self.oldest = self.newest
        elif now - self.middle[0] >= _WINDOW_SECONDS:
            self.oldest, self.middle = self.middle, self.newest

    def find_difference(self, name: str) -> Histogram:
        return self.newest[1][name].since(self.oldest[1][name])


def _has_restarted(before: Traffic, now: Traffic) -> bool:
    """Return whether a total has fallen. Engines for tasks without tokens have only histograms."""
    fell = (histogram.number < before[name].number for name, histogram in now.histograms.items())
    return now.tokens < before.tokens or any(fell)


@dataclass(slots=True)
class EngineFigures:
    """The figures of one service's engines. `read_at`: time of the last read, as the caller measures it."""

    read_at: float = 0.0
    figures: Figures = field(default_factory=Figures)
    _engines: dict[str, _Reads] = field(default_factory=dict)

    def add(self, pages: dict[str, str], now: float) -> None:
        """Add the pages of the engines, in Prometheus' text format. A page that cannot be parsed is left out."""
        self.read_at = now
        for address in self._engines.keys() - pages.keys():
            if now - self._engines[address].newest[0] > _KEPT_SECONDS:
                del self._engines[address]
        for address, page in pages.items():
            try:
                traffic = read_traffic([page])
            except (ValueError, LookupError):
                continue
            if address in self._engines:
                self._engines[address].add(traffic, now)
            else:
                self._engines[address] = _Reads(*((now, traffic) for _ in range(3)))
        self.figures = self._compute()

    def _compute(self) -> Figures:
        engines = list(self._engines.values())
        usages = [usage for each in engines if (usage := each.newest[1].kv_usage) is not None]
        rates = [
            (each.newest[1].tokens - each.oldest[1].tokens) / (each.newest[0] - each.oldest[0])
            for each in engines
            if each.newest[0] > each.oldest[0]
        ]
        return Figures(
            first_token_seconds=self._find_percentile("ttft") or self._find_percentile("latency"),
            between_tokens_seconds=self._find_percentile("itl"),
            tokens_per_second=sum(rates) if rates else None,
            kv_usage=max(usages, default=None),
        )

    def _find_percentile(self, name: str) -> float | None:
        total = Histogram()
        for each in self._engines.values():
            total.add(each.find_difference(name))
        return total.percentile(PERCENTILE) if total.number else None
