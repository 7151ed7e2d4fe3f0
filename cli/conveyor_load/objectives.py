"""The objectives of a service: limits on the P95 of latencies. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from conveyor_api.quantities import parse_duration_seconds

PERCENT: Final = 95
_SHORT: Final = {"ttft": "timeToFirstToken", "itl": "interTokenLatency"}
_FIELDS: Final = {
    "timeToFirstToken": "ttft_seconds",
    "interTokenLatency": "itl_seconds",
    "latency": "latency_seconds",
}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits on P95 latencies, in seconds. None: no limit."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    latency_seconds: float | None = None

    def items(self) -> list[tuple[str, float]]:
        """Return (name in the spec, seconds) for each objective that is set."""
        found = ((name, getattr(self, field)) for name, field in _FIELDS.items())
        return [(name, seconds) for name, seconds in found if seconds is not None]

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds * 1000:g} ms" for name, seconds in self.items())


def parse_objectives(text: str) -> Objectives:
    """Parse `ttft=500ms,itl=40ms`, `timeToFirstToken=500ms` or `latency=2s`. Raises ValueError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\w+)=(\w+)", part.strip())
        name = _SHORT.get(match[1], match[1]) if match else ""
        if match is None or name not in _FIELDS:
            raise ValueError(f"must be such as ttft=500ms,itl=40ms or latency=2s, not {text!r}")
        if _FIELDS[name] in found:
            raise ValueError(f"has {name} twice")
        seconds = parse_duration_seconds(match[2])
        if not 0 < seconds <= 3600:
            raise ValueError(f"{name} must be between 1ms and 1h")
        found[_FIELDS[name]] = seconds
    return Objectives(**found)
