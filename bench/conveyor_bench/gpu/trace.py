"""The stage `profile` records decode steps with torch's profiler: how long each kernel ran, and when nothing ran.

A step ends when its tokens have been copied to the host. It has no other copy to the host.
"""

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.gpu.models import timed_core, write_config
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes
from conveyor_bench.gpu.throughput import build_config
from conveyor_bench.gpu.workloads import batch_requests, lengths_of
from conveyor_engine.loop.core import EngineCore

_ON_THE_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_THE_HOST = {"cpu_op"}  # in a rehearsal
_END_OF_STEP = "DtoH"
_NAMES_SHOWN = 20
_NAME_LENGTH = 90
_PLAIN_STEPS = 10  # before the profiled steps
_MARGIN_TOKENS = 100  # additional tokens of each request, so that all rows decode until the last profiled step


@dataclass(frozen=True, slots=True)
class Interval:
    """A kernel or a copy. Times are in microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which nothing ran."""

    before: Interval  # the last interval that ran
    after: Interval
    length: float


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    num_steps = sizes.profiled.output_tokens
    batch = replace(sizes.profiled, output_tokens=num_steps + _PLAIN_STEPS + _MARGIN_TOKENS)
    requests = batch_requests(batch, SHAPES[sizes.small]["vocab_size"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        core, _, _ = timed_core(build_config(write_config(folder, sizes.small), sizes, [lengths_of(requests)]))
        for request in requests:
            core.add_request(request)
        plain = _decode(core, batch.requests, _PLAIN_STEPS)
        on_device = core.facts.device != "cpu"
        with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as profiler:
            seconds = _decode(core, batch.requests, num_steps)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        intervals = read_trace(folder / "trace.json", _ON_THE_DEVICE if on_device else _ON_THE_HOST)
    results.row(
        "step",
        shape=sizes.small,
        rows=batch.requests,
        steps=num_steps,
        ms_unprofiled=1000 * plain / _PLAIN_STEPS,
        ms_profiled=1000 * seconds / num_steps,
        **summarise(intervals, num_steps),
    )
    for row in sum_by_kernel(intervals, num_steps):
        results.row("kernels of a step", **row)
    for row in sum_by_gap(find_gaps(intervals), num_steps):
        results.row("gaps of a step", **row)


def _decode(core: EngineCore, rows: int, num_steps: int) -> float:
    """Run steps until all rows decode, and then `num_steps` more. Returns the seconds of these `num_steps` steps."""
    while core.stats().step_num_seqs < rows or core.stats().step_num_tokens > rows:
        core.step(time.monotonic())
    started = time.monotonic()
    for _ in range(num_steps):
        core.step(time.monotonic())
    return time.monotonic() - started


def read_trace(path: Path, categories: set[str]) -> list[Interval]:
    """Return the intervals of these categories in a Chrome trace, in the order of time."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in categories and "dur" in e]
    found = [Interval(str(e["name"]), float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events]
    return sorted(found, key=lambda interval: interval.begin)


def find_gaps(intervals: Sequence[Interval]) -> list[Gap]:
    """Return the gaps between intervals, which are sorted by their begin and may overlap."""
    gaps, last = [], intervals[0]
    for interval in intervals[1:]:
        if interval.begin > last.end:
            gaps.append(Gap(last, interval, interval.begin - last.end))
        if interval.end > last.end:
            last = interval
    return gaps


def summarise(intervals: Sequence[Interval], num_steps: int) -> dict[str, object]:
    """Return the steps' length on the device, the share in which nothing ran, and the share between two steps."""
    if not intervals:
        raise RuntimeError("the profiler saw nothing run on the device")
    span = max(interval.end for interval in intervals) - intervals[0].begin
    gaps = find_gaps(intervals)
    between = [gap.length for gap in gaps if _END_OF_STEP in gap.before.name]
    return {
        "device_ms": span / num_steps / 1000,
        "idle": sum(gap.length for gap in gaps) / span,
        "between_steps_us": statistics.median(between) if between else None,
        "between_steps": sum(between) / span if between else None,
        "launches": len(intervals) / num_steps,
    }


def sum_by_kernel(intervals: Sequence[Interval], num_steps: int) -> list[dict[str, object]]:
    """Return for each kernel its calls and microseconds per step and its share of the time, the longest first."""
    spent: dict[str, list[float]] = defaultdict(list)
    for interval in intervals:
        spent[interval.name].append(interval.end - interval.begin)
    whole = sum(map(sum, spent.values()))
    ordered = sorted(spent.items(), key=lambda item: -sum(item[1]))[:_NAMES_SHOWN]
    return [
        {
            "kernel": name[:_NAME_LENGTH],
            "calls": len(times) / num_steps,
            "us": sum(times) / num_steps,
            "share": sum(times) / whole,
        }
        for name, times in ordered
    ]


def sum_by_gap(gaps: Sequence[Gap], num_steps: int) -> list[dict[str, object]]:
    """Return the number and microseconds of gaps per step, by the kernels before and after, the longest first."""
    lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
    for gap in gaps:
        lengths[gap.before.name[:_NAME_LENGTH], gap.after.name[:_NAME_LENGTH]].append(gap.length)
    ordered = sorted(lengths.items(), key=lambda item: -sum(item[1]))[:_NAMES_SHOWN]
    return [
        {"before": before, "after": after, "gaps": len(found) / num_steps, "us": sum(found) / num_steps}
        for (before, after), found in ordered
    ]
