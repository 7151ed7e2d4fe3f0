"""The common parts of `kubectl conveyor tune` and `python -m conveyor_bench tune`: flags, the trace and the report."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from conveyor_api.quantities import parse_duration_seconds
from conveyor_insight.tuning.candidates import Plan
from conveyor_insight.tuning.report import build_curve, build_json, build_recommendation, build_results, draw_curve
from conveyor_insight.tuning.sweep import Measure, Result, Sweep
from conveyor_load.objectives import parse_objectives
from conveyor_load.traces import Lengths, Trace, draw_trace, parse_lengths, read_trace

_DRAWN: Final = 4096
_MAX_RATE: Final = 2000
T = TypeVar("T")


def as_flag(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap a parser for argparse, so that the message of a ValueError is shown to the user."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    return as_flag(lambda text: [parse(part.strip()) for part in text.split(",")])


def _parse_size(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 1024):
        raise ValueError(f"must be whole numbers from 1 to 1024, not {text!r}")
    return int(text)


def _parse_tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= 16_777_216):
        raise ValueError(f"must be whole numbers from 1 to 16777216, not {text!r}")
    return int(text)


def _parse_window(text: str) -> str:
    if not 0.001 <= parse_duration_seconds(text) <= 3600:
        raise ValueError(f"must be from 1ms to 1h, not {text}")
    return text


def _parse_number(text: str, least: float, most: float) -> float:
    number = float(text)
    if not (math.isfinite(number) and least <= number <= most):
        raise ValueError(f"must be from {least:g} to {most:g}, not {text}")
    return number


def add_flags(parser: argparse.ArgumentParser, *, objective_required: bool = True) -> None:
    """Add the flags that both commands have."""
    parser.add_argument(
        "--objective",
        type=as_flag(parse_objectives),
        required=objective_required,
        metavar="LIMITS",
        help="what 95 %% of requests must keep: ttft=500ms,itl=40ms, or latency=2s; ttft is timeToFirstToken, "
        "itl interTokenLatency",
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded requests: JSON Lines with timestamp (ms), input_length and output_length (tokens)",
    )
    lengths = as_flag(parse_lengths)
    load.add_argument(
        "--input-tokens", type=lengths, default=Lengths(256, 1024), metavar="P50,P95",
        help="without a trace: prompts at P50 and P95 (default 256,1024)",
    )  # fmt: skip
    load.add_argument(
        "--output-tokens", type=lengths, default=Lengths(128, 512), metavar="P50,P95",
        help="without a trace: answers at P50 and P95 (default 128,512)",
    )  # fmt: skip
    load.add_argument(
        "--rate", type=_list_of(lambda text: _parse_number(text, 0.01, _MAX_RATE)), default=[], metavar="R,...",
        help="requests a second, tried from the lowest on until the objectives are missed; default: search for the "
        "highest rate that meets the objectives, by doubling or halving and then between the last two",
    )  # fmt: skip
    load.add_argument(
        "--seconds", type=as_flag(lambda text: _parse_number(text, 1, 3600)), default=30.0,
        help="length of the load at each rate (default 30)",
    )  # fmt: skip
    load.add_argument("--seed", type=int, default=0, help="seed for drawn lengths, arrivals and texts (default 0)")
    tried = parser.add_argument_group("settings that are tried")
    tried.add_argument(
        "--max-batch-size", type=_list_of(_parse_size), default=[], metavar="N,...",
        help="batch limits; default: half, twice and four times the current one",
    )  # fmt: skip
    tried.add_argument(
        "--window", type=_list_of(_parse_window), default=[], metavar="TIME,...",
        help="windows of the modes Static and Dynamic; default: half, twice and four times the current one",
    )  # fmt: skip
    tried.add_argument(
        "--max-batch-tokens", type=_list_of(_parse_tokens), default=[], metavar="N,...",
        help="tokens of a step; not tried unless the spec or this flag names some",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the curve of throughput and latency there")
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text", help="default: %(default)s")


def read_load(flags: argparse.Namespace, task: str, context_tokens: int | None) -> Trace:
    """Return the trace for the flags, cut to the model's context. Raises OSError or ValueError."""
    if flags.trace is not None:
        with flags.trace.open(encoding="utf-8", errors="replace") as lines:
            try:
                trace = read_trace(lines)
            except ValueError as error:
                raise ValueError(f"{flags.trace}: {error}") from None
    else:
        trace = draw_trace(flags.input_tokens, flags.output_tokens if task == "Generate" else None, _DRAWN, flags.seed)
    # Prompts are built from words, so a prompt may be a few percent longer than intended.
    return trace.fit(None if context_tokens is None else int(context_tokens * 0.9))


def build_sweep(flags: argparse.Namespace, trace: Trace, measure: Measure) -> Sweep:
    """Build the sweep.

    The search for the highest rate starts at the trace's rate, or without a trace at 1 request/s.
    """
    least = 2 / flags.seconds
    first = min(max(trace.rate, least), float(_MAX_RATE)) if flags.trace is not None else max(1.0, least)
    return Sweep(flags.objective, measure, flags.rate, first, least)


def report(results: Sequence[Result], plan: Plan, flags: argparse.Namespace, *, is_whole: bool = True) -> str:
    """Return the report as text or JSON, and write the SVG. If the SVG cannot be written, the text says so.

    is_whole: whether the sweep ran to its end. If it did not, the report recommends nothing.
    """
    try:
        if flags.svg is not None:
            flags.svg.write_text(draw_curve(results, flags.objective), encoding="utf-8")
        problem = ""
    except (OSError, ValueError) as error:
        problem = f"no SVG: {error}"
    if flags.output == "json":
        return json.dumps(build_json(results, plan.current, is_whole=is_whole), indent=2)
    curve, advice = build_curve(results, flags.objective), "Not all settings were measured, so none is recommended."
    if is_whole:
        advice = build_recommendation(results, plan, flags.objective)
    return "\n\n".join(part for part in (build_results(results), curve, advice, problem) if part)
