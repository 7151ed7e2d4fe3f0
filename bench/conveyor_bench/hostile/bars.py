"""The bars of measurements beside an attack. They limit what the attack adds. Pure, except for `print_result`."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar. It is met if `beside` minus `alone` is below the limit.

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


def print_result(benchmark: str, bars: Sequence[Bar]) -> bool:
    """Print one JSON object. Returns whether all bars are met."""
    rows = [asdict(bar) | {"met": bar.met} for bar in bars]
    print(json.dumps({"benchmark": benchmark, "load_average": os.getloadavg(), "bars": rows}))
    return all(bar.met for bar in bars)
