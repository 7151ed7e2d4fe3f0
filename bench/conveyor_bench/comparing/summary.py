"""The summary of the measured turns that `engine` prints last."""

from collections.abc import Sequence
from typing import Any

from conveyor_bench.comparing.limit import Limit
from conveyor_bench.comparing.slices import (
    LIMIT,
    Estimate,
    Phase,
    Turn,
    dropped,
    phase_ratio,
    phase_seconds,
    pool,
    ratio,
    seconds,
)
from conveyor_bench.comparing.systems import Workload
from conveyor_bench.comparing.turns import OURS, settled

PHASES: tuple[Phase, ...] = ("prefill", "decode")


def summarise(rounds: Sequence[Sequence[Turn]], workload: Workload) -> dict[str, Any]:
    """Return the figures for JSON. They are null if no slice counts.

    `spread` is half of the median's 95 % interval, divided by the median. `rounds` in the result has each system's rate
    in each pass over the whole workload, including slices that do not count.
    """
    turns = pool(rounds)
    names = [name for name in turns[0].slices if name != LIMIT]
    ours = seconds(turns, OURS, workload.output_tokens)
    return {
        "output_tokens_per_second": _rate(ours, workload),
        "spread": _rounded(ours.spread if ours else None),
        "settled": settled(turns, workload),
        "peers": {name: _peer(turns, name, workload) for name in names if name != OURS},
        "slices": {name: len(turns) for name in names},
        "dropped": {name: dropped(turns, name) for name in names},
        "rounds": {name: [_whole_rate(turns, name, workload) for turns in rounds] for name in names},
    }


def compare_with_limit(turns: Sequence[Turn], limit: Limit, workload: Workload) -> dict[str, Any]:
    """Return `limit_fraction`, the limit's time for the workload divided by the engine's, and details in `limit`."""
    found = ratio(turns, OURS, LIMIT, workload.output_tokens)
    return {
        "limit_fraction": _rounded(found.value if found else None),
        "limit": {
            "output_tokens_per_second": _rate(seconds(turns, LIMIT, workload.output_tokens), workload),
            "spread": _rounded(found.spread if found else None),
            "seconds": {
                phase: _rounded(phase_seconds(turns, phase, LIMIT, workload.output_tokens)) for phase in PHASES
            },
            "fractions": {
                phase: _rounded(part.value if part else None)
                for phase in PHASES
                for part in [phase_ratio(turns, phase, OURS, LIMIT)]
            },
            **limit.describe(),
        },
    }


def _peer(turns: Sequence[Turn], name: str, workload: Workload) -> dict[str, Any]:
    found = ratio(turns, OURS, name, workload.output_tokens)
    parts = {phase: phase_ratio(turns, phase, OURS, name) for phase in PHASES}
    return {
        "output_tokens_per_second": _rate(seconds(turns, name, workload.output_tokens), workload),
        "ratio": _rounded(found.value if found else None),
        "spread": _rounded(found.spread if found else None),
        "phases": {
            phase: part and {"ratio": _rounded(part.value), "spread": _rounded(part.spread), "pairs": part.count}
            for phase, part in parts.items()
        },
    }


def _rate(found: Estimate | None, workload: Workload) -> float | None:
    return None if found is None else round(workload.requests * workload.output_tokens / found.value, 2)


def _whole_rate(turns: Sequence[Turn], name: str, workload: Workload) -> float:
    spent = sum(turn.slices[name].seconds for turn in turns)
    return round(workload.requests * workload.output_tokens / spent, 2)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
