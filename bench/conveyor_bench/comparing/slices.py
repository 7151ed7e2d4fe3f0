"""Statistics of slices of runs: which slices count, how fast a system is, how two systems compare. Pure.

Used by `turns`.

In a turn, every system runs the same part of the same workload, one right after the other. So other load on the host
usually affects all systems. Prefill and decode are different work and are never compared with each other.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SLICE_SECONDS = 1.0
STOLEN_AT_MOST = 0.05
SETTLED_BELOW = 0.05
FEWEST = 5  # with fewer slices of a phase, their spread means nothing

LIMIT = "limit"  # a name among a turn's systems; its time is the least that the engine could have taken

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Slice:
    """The time in which a system made the next `tokens` tokens of every request."""

    tokens: int
    seconds: float
    stolen: float  # share of all processors' time that the host gave to other machines

    @property
    def counts(self) -> bool:
        return self.stolen <= STOLEN_AT_MOST

    @property
    def pace(self) -> float:
        """The seconds for one token of every request."""
        return self.seconds / self.tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A slice of each system, by its name, in one phase: prefill (including the first tokens) or decode."""

    phase: Phase
    slices: Mapping[str, Slice]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its uncertainty."""

    value: float
    spread: float  # half the width of the median's 95 % interval, divided by the median
    count: int  # number of measurements; for a weighted sum, the smallest count among its parts

    @property
    def settled(self) -> bool:
        return self.count >= FEWEST and self.spread < SETTLED_BELOW


def pool(rounds: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return all turns. A round that is too short for a slice is merged, phase by phase, with the next rounds.

    A last round that is too short is merged with the round before. So each system runs for at least SLICE_SECONDS in
    each merged round, unless all rounds together are shorter.
    """
    groups: list[list[Turn]] = []
    for turns in rounds:
        if groups and _is_short(groups[-1]):
            groups[-1] = _merged([*groups[-1], *turns])
        else:
            groups.append(list(turns))
    if len(groups) > 1 and _is_short(groups[-1]):
        groups[-2:] = [_merged([*groups[-2], *groups[-1]])]
    return [turn for turns in groups for turn in turns]


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return an estimate from repeated measurements of one figure; None without measurements.

    The interval is computed as for a box plot's notches (McGill, Tukey, Larsen 1978). On both sides it is 1.57 times
    the interquartile range divided by the square root of the number of measurements, so more measurements make it
    smaller.
    """
    if not values:
        return None
    middle = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (middle,) * 3
    return Estimate(middle, 1.57 * (high - low) / math.sqrt(len(values)) / middle, len(values))


def seconds(turns: Sequence[Turn], system: str, output_tokens: int) -> Estimate | None:
    """Return the seconds of a whole run, from the paces of its phases; None if a phase has no slice that counts."""
    paces = {phase: estimate(_paces(turns, phase, system)) for phase in _tokens_of(output_tokens)}
    return _weigh(paces, lambda phase: _tokens_of(output_tokens)[phase])


def ratio(turns: Sequence[Turn], ours: str, peer: str, output_tokens: int) -> Estimate | None:
    """Return the peer's time for a whole run divided by ours: the phases' ratios, weighted by our time in each."""
    phases = {phase: phase_ratio(turns, phase, ours, peer) for phase in _tokens_of(output_tokens)}
    whole = seconds(turns, ours, output_tokens)
    if whole is None:
        return None
    return _weigh(phases, lambda phase: (phase_seconds(turns, phase, ours, output_tokens) or 0.0) / whole.value)


def phase_ratio(turns: Sequence[Turn], phase: Phase, ours: str, peer: str) -> Estimate | None:
    """Return the peer's seconds divided by ours, from pairs of slices that both count."""
    pairs = [(turn.slices[ours], turn.slices[peer]) for turn in turns if turn.phase == phase]
    return estimate([b.pace / a.pace for a, b in pairs if a.counts and b.counts])


def phase_seconds(turns: Sequence[Turn], phase: Phase, system: str, output_tokens: int) -> float | None:
    """Return the seconds of this phase in a whole run; None without a slice that counts."""
    pace = estimate(_paces(turns, phase, system))
    return None if pace is None else pace.value * _tokens_of(output_tokens)[phase]


def dropped(turns: Sequence[Turn], system: str) -> int:
    """Return the number of the system's slices that do not count, because the host took too much time."""
    return sum(not turn.slices[system].counts for turn in turns)


def _is_short(turns: Sequence[Turn]) -> bool:
    names = [name for name in turns[0].slices if name != LIMIT]
    return any(sum(turn.slices[name].seconds for turn in turns) < SLICE_SECONDS for name in names)


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """Merge the turns of each phase to one turn."""
    phases = {turn.phase: [other for other in turns if other.phase == turn.phase] for turn in turns}
    return [
        Turn(phase, {name: _sum([turn.slices[name] for turn in same]) for name in same[0].slices})
        for phase, same in phases.items()
    ]


def _sum(parts: Sequence[Slice]) -> Slice:
    seconds = sum(part.seconds for part in parts)
    stolen = sum(part.stolen * part.seconds for part in parts) / seconds
    return Slice(sum(part.tokens for part in parts), seconds, stolen)


def _paces(turns: Sequence[Turn], phase: Phase, system: str) -> list[float]:
    return [t.slices[system].pace for t in turns if t.phase == phase and t.slices[system].counts]


def _tokens_of(output_tokens: int) -> dict[Phase, int]:
    """Return the number of tokens of each request by phase. The prefill makes the first token."""
    return {"prefill": 1, "decode": output_tokens - 1} if output_tokens > 1 else {"prefill": 1}


def _weigh(parts: Mapping[Phase, Estimate | None], weight: Callable[[Phase], float]) -> Estimate | None:
    """Return the weighted sum; None if a part is None. Spreads add up, as if all errors had the same direction."""
    known = {phase: part for phase, part in parts.items() if part is not None}
    if len(known) < len(parts):
        return None
    shares = {phase: part.value * weight(phase) for phase, part in known.items()}
    whole = sum(shares.values())
    spread = sum(share * known[phase].spread for phase, share in shares.items()) / whole
    return Estimate(whole, spread, min(part.count for part in known.values()))
