"""Reports a sweep: a table, the curve of throughput and latency as text and SVG, and a recommendation. Pure."""

import json
from collections.abc import Sequence
from typing import Any, Final

from conveyor_insight.svg import Series, axis_for, lines
from conveyor_insight.tables import build_table
from conveyor_insight.tuning.candidates import Candidate, Plan
from conveyor_insight.tuning.sweep import Result, Trial, choose
from conveyor_load.figures import Spread
from conveyor_load.objectives import Objectives

_WIDTH: Final = 60
_HEIGHT: Final = 12
_MARKS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SPREADS: Final = {"timeToFirstToken": "ttft", "interTokenLatency": "itl", "latency": "latency"}


def build_results(results: Sequence[Result]) -> str:
    """Return a table with a row for each trial. Times are in milliseconds as P50/P95/P99."""
    head = ("", "BATCHING", "REQUESTS/S", "GOODPUT", "TOKENS/S", "TTFT MS", "ITL MS", "LATENCY MS", "OBJECTIVES")
    rows: list[tuple[str, ...]] = [head]
    for mark, result in zip(_MARKS, results, strict=False):
        rows += [_build_row(mark, result.candidate, trial) for trial in sorted(result.trials, key=lambda t: t.rate)]
        if result.problem:
            rows.append((mark, str(result.candidate), "", "", "", "", "", "", f"does not run: {result.problem}"))
    return build_table(rows)


def _build_row(mark: str, candidate: Candidate, trial: Trial) -> tuple[str, ...]:
    figures = trial.figures
    spreads = (_build_spread(spread) for spread in (figures.ttft, figures.itl, figures.latency))
    rates = (f"{rate:.3g}" for rate in (figures.offered, figures.goodput, figures.output_tokens))
    return mark, str(candidate), *rates, *spreads, "met" if not trial.misses else "; ".join(trial.misses)


def _build_spread(spread: Spread) -> str:
    return "/".join(f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:.0f}" for seconds in spread)


def build_recommendation(results: Sequence[Result], plan: Plan, objectives: Objectives) -> str:
    """Return the recommendation: the reason, and a patch for `spec.batching`."""
    current = plan.current
    chosen, before = choose(results, current), next(result for result in results if result.candidate == current)
    if chosen.best is None:
        return _describe_none(results, objectives)
    met = f"meets {objectives} at P95 up to {chosen.best.rate:.3g} requests/s"
    if chosen.candidate == current:
        return f"The current {current} {met}. No other setting serves 5 % more, so keep it."
    text = f"{chosen.candidate} {met}"
    if before.best is None:
        text += f"; the current {current} meets them at no rate that was tried."
    else:
        text += f"; the current {current} only up to {before.best.rate:.3g}."
    return text + "\n\n" + build_patch(plan, chosen.candidate)


def _describe_none(results: Sequence[Result], objectives: Objectives) -> str:
    lowest = [min(result.trials, key=lambda trial: trial.rate) for result in results if result.trials]
    if not lowest:
        return "No setting runs, so there is nothing to recommend."
    nearest = min(lowest, key=lambda trial: trial.rate)
    text = f"No setting meets {objectives} at P95. At {nearest.rate:.3g} requests/s: {'; '.join(nearest.misses)}. "
    text += "Allow a longer time in --objective, or shorten prompts and answers. "
    return text + "To see how long a single request takes, run again with a lower --rate."


def build_patch(plan: Plan, chosen: Candidate) -> str:
    """Return YAML for `kubectl patch --type merge --patch-file`, with changed fields only."""
    changed = (f"    {name}: {json.dumps(value)}" for name, value in sorted(plan.build_fields(chosen).items()))
    return "\n".join(["spec:", "  batching:", *changed])


def build_json(results: Sequence[Result], current: Candidate, *, is_whole: bool = True) -> dict[str, Any]:
    """Return all trials and the recommended setting.

    The setting is null if none meets the objectives or the sweep was interrupted.
    """
    chosen = choose(results, current)
    return {
        "current": current.fields(),
        "recommended": chosen.candidate.fields() if is_whole and chosen.best is not None else None,
        "candidates": [
            {
                "batching": result.candidate.fields(),
                "problem": result.problem or None,
                "trials": [_build_trial(trial) for trial in result.trials],
            }
            for result in results
        ],
    }


def _build_trial(trial: Trial) -> dict[str, Any]:
    figures = trial.figures
    return {
        "requestsPerSecond": figures.offered,
        "goodput": figures.goodput,
        "requests": figures.requests,
        "failed": figures.failed,
        "problems": dict(figures.problems),
        "inputTokensPerSecond": figures.input_tokens,
        "outputTokensPerSecond": figures.output_tokens,
        **{name: getattr(figures, field)._asdict() for name, field in _SPREADS.items()},
        "misses": list(trial.misses),
    }


def _points(result: Result, shown: str) -> list[tuple[float, float]]:
    """Return (throughput, P95 in milliseconds) for each trial that had answers."""
    found = sorted(result.trials, key=lambda trial: trial.rate)
    return [
        (_throughput(trial), getattr(trial.figures, _SPREADS[shown]).p95 * 1000)
        for trial in found
        if trial.figures.failed < trial.figures.requests
    ]


def _throughput(trial: Trial) -> float:
    return trial.figures.output_tokens or trial.figures.offered


def _unit(results: Sequence[Result]) -> str:
    has_tokens = any(trial.figures.output_tokens for result in results for trial in result.trials)
    return "output tokens/s" if has_tokens else "requests/s"


def draw_curve(results: Sequence[Result], objectives: Objectives) -> str:
    """Return the SVG with a line for each candidate and a point for each rate. Raises ValueError without points."""
    shown, limit = objectives.items()[0]
    series = [
        Series(str(result.candidate), number % 8, points, [f"{t.rate:.3g}/s" for t in _drawn(result)])
        for number, result in enumerate(results)
        if (points := _points(result, shown))
    ]
    if not series:
        raise ValueError("there is nothing to draw: no request was answered")
    across, up = zip(*(point for one in series for point in one.values), strict=True)
    axes = axis_for(across, _unit(results)), axis_for([*up, limit * 1000], "ms")
    series.append(Series("objective", 6, [(0.0, limit * 1000), (axes[0].high, limit * 1000)], ["", ""]))
    subtitle = f"Up: {shown} at P95 in ms. Right: {_unit(results)}. Labels: requests a second"
    return lines("Throughput and latency of each setting", subtitle, series, *axes)


def _drawn(result: Result) -> list[Trial]:
    found = sorted(result.trials, key=lambda trial: trial.rate)
    return [trial for trial in found if trial.figures.failed < trial.figures.requests]


def build_curve(results: Sequence[Result], objectives: Objectives) -> str:
    """Return the curve as text; "" without points. The letters are the table's, and `-` marks the objective."""
    shown, limit = objectives.items()[0]
    points = [(mark, point) for mark, result in zip(_MARKS, results, strict=False) for point in _points(result, shown)]
    if not points:
        return ""
    most_x = max(x for _, (x, _) in points) or 1.0
    # A trial far above the objective would leave no room for the others.
    most_y = min(max(limit * 1000, *(y for _, (_, y) in points)), limit * 3000)
    rows = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    rows[_row(limit * 1000, most_y)] = ["-"] * _WIDTH
    for mark, (x, y) in points:
        rows[_row(y, most_y)][min(_WIDTH - 1, round(x / most_x * (_WIDTH - 1)))] = mark
    labels = {0: f"{most_y:.0f}", _HEIGHT - 1: "0", _row(limit * 1000, most_y): f"{limit * 1000:.0f}"}
    drawn = [f"{labels.get(number, ''):>8} |{''.join(row)}" for number, row in enumerate(rows)]
    return "\n".join([f"{shown} at P95, ms", *(line.rstrip() for line in drawn), f"{'':9}+{'-' * _WIDTH}"]) + (
        f"\n{'':10}0{f'{most_x:.3g} {_unit(results)}':>{_WIDTH - 1}}"
    )


def _row(milliseconds: float, most: float) -> int:
    return _HEIGHT - 1 - round(min(milliseconds / most, 1) * (_HEIGHT - 1))
