"""Reports the results of a case as a table and as JSON. Pure; used by `conveyor_kubectl.simulating`.

A case runs with several seeds. Each figure is the worst value over these runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conveyor_insight.simulate.run import Case, Outcome

_HEAD = "| scenario | peak replicas | mean | replica-seconds | p50 wait, s | p95 wait, s | failed | settled after, s |"


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one case. `settled_seconds`: None for a load that has no last change, such as a steady one."""

    scenario: str
    peak_replicas: int
    mean_replicas: float
    replica_seconds: int
    p50_wait_seconds: float
    p95_wait_seconds: float
    failed: int
    settled_seconds: float | None


def summarise(case: Case, outcomes: Sequence[Outcome]) -> Figures:
    seconds = max(outcome.replica_seconds for outcome in outcomes)
    changed_at = case.trace.changed_at
    settled = [each for outcome in outcomes if (each := outcome.settled_seconds(changed_at)) is not None]
    return Figures(
        scenario=case.name,
        peak_replicas=max(outcome.peak for outcome in outcomes),
        mean_replicas=round(seconds / case.trace.seconds, 1),
        replica_seconds=round(seconds),
        p50_wait_seconds=round(max(outcome.wait(0.5) for outcome in outcomes), 1),
        p95_wait_seconds=round(max(outcome.wait(0.95) for outcome in outcomes), 1),
        failed=max(outcome.failed for outcome in outcomes),
        settled_seconds=max(settled, default=None),
    )


def build_table(rows: Iterable[Figures]) -> str:
    """Return a Markdown table with one line for each case."""
    lines = [_HEAD, "|" + " --- |" * (_HEAD.count("|") - 1)]
    for row in rows:
        cells = (
            "–" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell for cell in asdict(row).values()
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def build_json(figures: Figures, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the figures, and the samples of the run with the first seed."""
    return asdict(figures) | {"samples": [asdict(sample) for sample in outcomes[0].samples]}
