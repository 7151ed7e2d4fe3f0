"""Bars of the measurements beside an attack: what is judged is what the attack adds. Pure but for `print_result`."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Bar:
    """Met if `beside` less `alone` is below the limit.

    `alone` is the figure without the attack, or while the same attack is aimed elsewhere; 0 for an absolute bar.
    """

    attack: str
    name: str
    alone: float
    beside: float
    limit: float

    @property
    def met(self) -> bool:
        return self.beside - self.alone < self.limit

    def __str__(self) -> str:
        figures = f"alone {self.alone:9.3f}  beside {self.beside:9.3f}  bar + {self.limit:5g}"
        return f"{self.attack:11}  {self.name:34}  {figures}  {'met' if self.met else 'MISSED'}"


def p99(values: Sequence[float]) -> float:
    """Nearest rank: an answer that never came stays one."""
    return sorted(values)[int(len(values) * 0.99)]


def print_result(benchmark: str, bars: Sequence[Bar]) -> bool:
    """Prints one JSON object; returns whether all bars are met."""
    rows = [asdict(bar) | {"met": bar.met} for bar in bars]
    print(json.dumps({"benchmark": benchmark, "load_average": os.getloadavg(), "bars": rows}))
    return all(bar.met for bar in bars)
