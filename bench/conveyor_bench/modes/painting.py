"""Compare batching modes on a model that makes pictures, with Poisson arrivals: `python -m conveyor_bench paint-modes`.

The engine's own core runs the model, on one thread. The clock is the processor time of the steps, and requests arrive
at times of this clock. So other load on the machine affects the figures only through the shared processor caches.
With `--layout`, the model is a tiny random one of that layout, and diffusers' pipeline runs beside it in batches.
"""

import argparse
import random
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tests.engine.paint_layouts import PIPELINES, save_layout

from conveyor_bench.modes.painting_batches import paint_batches
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imagegenerate.facts import PaintRequest, build_params, read_facts
from conveyor_engine.wire.request import EngineRequest
from conveyor_load.percentiles import percentile
from e2e.demo_model import PAINTER, demo_model_directory

MODES: Final = ("dynamic", "continuous")
SEED: Final = 20261126
_SIDE: Final = 32  # of pictures, in pixels
_OBJECTIVE_TIMES: Final = 2.0  # a picture's objective, as a multiple of the time of a picture that is alone


@dataclass(frozen=True, slots=True)
class Load:
    """What every system gets."""

    directory: Path
    batch: int  # the most pictures in a step
    number: int  # pictures in all
    steps: tuple[int, int]  # least and most inference steps of a picture

    def draw_arrivals(self, rate: float) -> list[float]:
        """Return the time of each picture's arrival, in seconds."""
        draw, now, times = random.Random(SEED), 0.0, []
        for _ in range(self.number):
            now += draw.expovariate(rate)
            times.append(now)
        return times

    def count_steps(self, index: int) -> int:
        """Return the inference steps of the picture with this index, which are the same at each rate."""
        return random.Random(f"{SEED} {index}").randint(*self.steps)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one system at one rate."""

    seconds: list[float]  # from the arrival of each request to its picture
    total_seconds: float
    rows: float  # mean number of pictures in a step

    def describe(self, system: str, rate: float, objective: float) -> str:
        """Return a row of the table. objective: in seconds."""
        p50, p95 = (percentile(self.seconds, share) for share in (50, 95))
        done, in_time = len(self.seconds), sum(each <= objective for each in self.seconds)
        rates = f"{done / self.total_seconds:.1f} | {in_time / self.total_seconds:.1f}"
        return f"| {system} | {rate:.1f} | {rates} | {p50:.2f} s | {p95:.2f} s | {self.rows:.1f} |"


def main(arguments: Sequence[str]) -> int:
    """Print a table with a row for each system at each rate. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench paint-modes", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[], help="pictures a second, in place of --loads")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0, 1.25, 1.5], help="of the capacity")
    parser.add_argument("--pictures", type=int, default=100, help="at each rate")
    parser.add_argument("--batch", type=int, default=8, help="the most pictures in a step")
    parser.add_argument("--steps", type=int, nargs=2, default=[10, 50], help="least and most inference steps")
    parser.add_argument("--layout", choices=PIPELINES, help="a tiny random model of this layout; default: demo-paint")
    flags = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        if flags.layout:
            save_layout(directory, flags.layout)
        else:
            directory = demo_model_directory(PAINTER)
        load = Load(directory, flags.batch, flags.pictures, tuple(flags.steps))
        _compare(load, flags.rates, flags.loads, with_pipeline=flags.layout is not None)
    return 0


def _compare(load: Load, rates: Sequence[float], loads: Sequence[float], *, with_pipeline: bool) -> None:
    alone = percentile(measure("continuous", 0.01, load).seconds, 50)
    capacity = load.number / measure("continuous", 1e6, load).total_seconds
    objective = _OBJECTIVE_TIMES * alone
    print(f"{load.number} pictures of {_SIDE} x {_SIDE} with guidance at each rate, {load.steps[0]} to {load.steps[1]}")
    print(f"steps each; alone {alone:.2f} s, capacity {capacity:.1f} a second, objective {objective:.2f} s")
    print("| mode | arrive/s | done/s | in time/s | P50 | P95 | pictures a step |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for rate in rates or [capacity * each for each in loads]:
        for mode in MODES:
            print(measure(mode, rate, load).describe(mode.capitalize(), rate, objective), flush=True)
        if with_pipeline:
            arrivals, steps = load.draw_arrivals(rate), [load.count_steps(index) for index in range(load.number)]
            result = Result(*paint_batches(load.directory, _SIDE, load.batch, arrivals, steps))
            print(result.describe("diffusers", rate, objective), flush=True)


def measure(mode: str, rate: float, load: Load) -> Result:
    """Make pictures that arrive at `rate` per second. The pictures are the same in each mode, at each rate."""
    core = open_engine(mode, load)
    waiting = list(draw_requests(core, rate, load))[::-1]
    arrived: dict[str, float] = {}
    seconds: list[float] = []
    now = 0.0
    while waiting or core.has_unfinished():
        while waiting and waiting[-1].arrival_time <= now:
            request = waiting.pop()
            arrived[request.request_id] = request.arrival_time
            core.add_request(request)
        due_at = core.next_wakeup(now)
        if due_at is None or due_at > now:
            arrival = waiting[-1].arrival_time if waiting else due_at
            now = min(moment for moment in (due_at, arrival) if moment is not None)
            continue
        began = time.process_time()
        outputs = core.step(now)
        now += time.process_time() - began
        seconds += [now - arrived[output.request_id] for output in outputs if output.finish_reason is not None]
    forwards = read_facts(core.facts).nums_forwards
    rows = sum(forwards[load.count_steps(index) - 1] for index in range(load.number)) / core.stats().num_steps
    return Result(seconds, now, rows)


def open_engine(mode: str, load: Load) -> EngineCore:
    """Open an engine in this mode with the model and up to `batch` pictures in a step."""
    config = EngineConfig(
        model=str(load.directory),
        device="cpu",
        dtype="float32",
        batching_mode=mode,  # type: ignore[arg-type]  # one of MODES
        max_num_seqs=load.batch,
        max_num_queued_requests=100_000,
        num_threads=1,
    )
    return EngineCore(config, build_runner(config))


def draw_requests(core: EngineCore, rate: float, load: Load) -> Iterator[EngineRequest]:
    """Yield requests with their arrival times in seconds, in order of arrival."""
    facts = read_facts(core.facts)
    for index, arrival in enumerate(load.draw_arrivals(rate)):
        request = PaintRequest(
            size=facts.size._replace(width=_SIDE, height=_SIDE),
            num_inference_steps=load.count_steps(index),
            guidance_scale=7.5,
            has_guidance=facts.guides,
            packed_tokens=[array("I", [index % 25] * (len(each) // 4)).tobytes() for each in facts.empty_tokens],
        )
        yield EngineRequest(
            request_id=str(index),
            payload=request.encode(),
            params=build_params(index),
            payload_cost=request.cost,
            num_steps=facts.nums_forwards[request.num_inference_steps - 1],
            group=request.group,
            arrival_time=arrival,
        )
