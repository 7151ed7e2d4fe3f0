"""Compare batching modes on a model that makes pictures, with Poisson arrivals: `python -m conveyor_bench paint-modes`.

The engine's own core runs the model, on one thread. The clock is the processor time of the steps, and requests arrive
at times of this clock. So other load on the machine affects the figures only through the shared processor caches.
"""

import argparse
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.imagegenerate.facts import PaintRequest, read_facts
from conveyor_engine.wire.request import EngineRequest
from conveyor_load.percentiles import percentile
from e2e.demo_model import PAINTER, demo_model_directory

MODES: Final = ("dynamic", "continuous")
STEPS: Final = (10, 50)  # least and most inference steps of a picture
SEED: Final = 20261126


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one mode at one rate."""

    seconds: list[float]  # from the arrival of each request to its picture
    total_seconds: float
    rows: float  # mean number of pictures in a step

    def describe(self, mode: str, rate: float) -> str:
        """Return a row of the table."""
        p50, p95 = (percentile(self.seconds, share) for share in (50, 95))
        per_second = len(self.seconds) / self.total_seconds
        return f"| {mode} | {rate:.1f} | {per_second:.1f} | {p50:.2f} | {p95:.2f} | {self.rows:.1f} |"


def main(arguments: Sequence[str]) -> int:
    """Print a table with a row for each mode at each rate. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench paint-modes", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="pictures a second")
    parser.add_argument("--pictures", type=int, default=100, help="at each rate")
    parser.add_argument("--batch", type=int, default=8, help="the most pictures in a step")
    flags = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"pictures of 32 x 32, guidance, {STEPS[0]} to {STEPS[1]} steps; {flags.pictures} at each rate")
    print("| mode | arrive/s | done/s | P50 s | P95 s | pictures a step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for rate in flags.rates:
        for mode in MODES:
            print(measure(mode, rate, flags.pictures, flags.batch).describe(mode, rate), flush=True)
    return 0


def measure(mode: str, rate: float, number: int, batch: int) -> Result:
    """Make `number` pictures that arrive at `rate` per second. The pictures are the same in each mode, at each rate."""
    core = open_engine(mode, batch)
    waiting = list(draw_requests(core, rate, number))[::-1]
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
    steps = core.stats().num_steps
    rows = sum(count_steps(core, index) for index in range(number)) / steps
    return Result(seconds, now, rows)


def open_engine(mode: str, batch: int) -> EngineCore:
    """Open an engine in this mode with the demo's model and up to `batch` pictures in a step."""
    config = EngineConfig(
        model=str(demo_model_directory(PAINTER)),
        device="cpu",
        dtype="float32",
        batching_mode=mode,  # type: ignore[arg-type]  # one of MODES
        max_num_seqs=batch,
        max_num_batched_tokens=batch * 2 * 32 * 32,
        max_num_queued_requests=100_000,
        num_threads=1,
    )
    return EngineCore(config, build_runner(config))


def draw_requests(core: EngineCore, rate: float, number: int) -> Iterator[EngineRequest]:
    """Yield requests with their arrival times in seconds, in order of arrival."""
    draw, facts, now = random.Random(SEED), read_facts(core.facts), 0.0
    for index in range(number):
        now += draw.expovariate(rate)
        request = PaintRequest(
            size=facts.size,
            num_inference_steps=count_steps(core, index),
            guidance_scale=7.5,
            has_guidance=facts.guides,
            seed=index,
            packed_tokens=[array("I", [index % 80] * (len(each) // 4)).tobytes() for each in facts.empty_tokens],
        )
        yield EngineRequest(
            request_id=str(index),
            payload=request.encode(),
            payload_cost=request.cost,
            num_steps=facts.nums_forwards[request.num_inference_steps - 1],
            group=request.group,
            arrival_time=now,
        )


def count_steps(core: EngineCore, index: int) -> int:
    """Return the number of engine steps for the picture with this index, which is the same at each rate."""
    steps = random.Random(f"{SEED} {index}").randint(*STEPS)
    return read_facts(core.facts).nums_forwards[steps - 1]
