"""Draws the pictures of a run: throughput, utilisation, waste, latency, the ratio, and throughput by batch limit.

Used by `page`. Takes the objects of the JSON files, and uses no engine.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from conveyor_bench.modes.charts import LogAxis, MarkedAxis, bars, log_axis_for, ranges
from conveyor_insight.svg import Series, axis_for, lines

COLOURS = {"none": 0, "static": 1, "dynamic": 2, "continuous": 3, "transformers": 4}
NAMES = {
    "none": "None",
    "static": "Static",
    "dynamic": "Dynamic",
    "continuous": "Continuous",
    "transformers": "transformers, static",
}
BANDS = {"Static": (0.60, 0.80), "Dynamic": (0.70, 0.85), "Continuous": (0.90, 0.99)}
"""The ranges of device utilisation that guides to batching claim."""

Modes = Mapping[str, Mapping[str, Mapping[str, float]]]
_PERCENT = MarkedAxis(0.0, 1.06, "%", marks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
_SYSTEM_COLOURS = (5, 6, 7, 4)


def draw_throughput(modes: Modes, where: str) -> str:
    """Draw throughput as bars by cap."""
    series = _by_cap(modes, "output_tokens_per_second")
    axis = axis_for([value for one in series for (value,) in one.values], "tokens/s")
    return bars("Output tokens a second, by the longest output that is kept", where, _caps(modes), series, axis)


def draw_utilisation(modes: Modes, where: str) -> str:
    """Draw the share of places that compute, with the ranges that guides claim."""
    subtitle = f"{where}: share of the batch's places that compute for an unfinished request; grey: guides' claims"
    return bars(
        "Utilisation of the batch", subtitle, _caps(modes), _by_cap(modes, "utilisation"), _PERCENT, BANDS
    )  # fmt: skip


def draw_waste(modes: Modes, where: str) -> str:
    """Draw padding and unused room of the KV cache, with the longest outputs."""
    kinds = {
        "padding_waste": "padding, of all tokens",
        "kv_waste": "KV room unused",
        "kv_waste_if_reserved": "the same, if each reserved the longest",
    }
    cap = list(next(iter(modes.values())))[-1]
    series = [
        Series(NAMES[name], COLOURS[name], [(caps[cap].get(kind, 0.0),) for kind in kinds])
        for name, caps in modes.items()
    ]
    return bars(f"Waste, with outputs up to {cap} tokens", where, list(kinds.values()), series, _PERCENT)


def draw_ratio(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw Continuous divided by Static by cap, one line for each system."""
    series = [
        Series(name, _SYSTEM_COLOURS[number], [(float(cap), ratio) for cap, ratio in system["ratios"].items()])
        for number, (name, system) in enumerate(systems.items())
    ]
    values = [ratio for one in series for _, ratio in one.values]
    across = LogAxis(24.0, 2200.0, "longest output kept, tokens", marks=(32.0, 128.0, 512.0, 1536.0))
    return lines(
        "Continuous over Static: it grows with the variance of the lengths",
        "Ratio of output tokens a second",
        series,
        across,
        axis_for(values, "x"),
    )


def draw_latency(latency: Mapping[str, Mapping[str, Mapping[str, float]]], kind: str, title: str, where: str) -> str:
    """Draw P50, P95 and P99 of each mode by rate."""
    rates = list(latency)
    series = [
        Series(
            NAMES[name],
            COLOURS[name],
            [tuple(max(0.001, latency[rate][name][f"{kind}_p{share}"]) for share in (50, 95, 99)) for rate in rates],
        )
        for name in latency[rates[0]]
    ]
    axis = log_axis_for([value for one in series for each in one.values for value in each], "s")
    groups = [f"{float(rate):.3g} requests/s" for rate in rates]
    return ranges(title, f"{where}: seconds; large dot P50, then P95 and P99", groups, series, axis)


def draw_limits(systems: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw the device's tokens per second against those of a single user, one point for each batch limit."""
    series = [
        Series(
            name,
            _SYSTEM_COLOURS[number],
            [
                (each["tokens_per_second_per_user"], each["output_tokens_per_second"])
                for each in system["limits"].values()
            ],
            list(system["limits"]),
        )
        for number, (name, system) in enumerate(systems.items())
    ]
    users, devices = ([point[n] for one in series for point in one.values] for n in (0, 1))
    return lines(
        "What a larger batch costs a user: Continuous at each batch limit",
        "Up: output tokens a second of the device. Right: of one user (median). Labels: maxBatchSize",
        series,
        axis_for(users, "tokens/s for each user"),
        log_axis_for(devices, "tokens/s"),
    )


def _caps(modes: Modes) -> list[str]:
    return [f"up to {cap}" for cap in next(iter(modes.values()))]


def _by_cap(modes: Modes, key: str) -> Sequence[Series]:
    return [
        Series(NAMES[name], COLOURS[name], [(each[key],) for each in caps.values()]) for name, caps in modes.items()
    ]
