"""`python -m conveyor_bench adapter-slots`: the first token with more LoRA adapters than slots, and with all loaded.

Requests arrive at random times, each with one adapter, whose popularity follows Zipf's law. In each round, engines with
fewer slots and an engine with a slot for each adapter serve the same requests in turns, on a model with random weights.
Time is the processor time of this process, so that other load on the machine counts little; while an engine is idle,
the next request arrives at once. The reader's thread counts as if it ran between the steps. The last line printed is
one JSON object.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import write_model
from conveyor_bench.engine.adapters import write_adapters
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.build import build_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.messages import AdapterFailed, AdapterLoaded, LoadAdapter
from conveyor_engine.wire.request import EngineRequest, SamplingParams


class Arrival(NamedTuple):
    """A request. seconds: after the first one."""

    seconds: float
    adapter: int
    prompt: list[int]


class Engine:
    """An engine with this number of slots, to which all adapters are declared."""

    def __init__(
        self, model: Path, sources: Sequence[tuple[str, str]], slots: int, options: argparse.Namespace
    ) -> None:
        self._tokens, self._serials = options.tokens, itertools.count()
        config = EngineConfig(
            model=str(model),
            adapters_file="followed by nobody",
            adapter_slots=slots,
            device="cpu",
            dtype="bfloat16",
            max_model_len=options.prompt_tokens + options.tokens,
            max_num_seqs=options.rows,
            max_num_queued_requests=2 * options.requests,
            prefix_caching=False,
            num_threads=torch.get_num_threads(),
        )
        self._core = EngineCore(config, build_runner(config))
        for number, (name, folder) in enumerate(sources, start=1):
            self._core.adapters.load(LoadAdapter(number, name, folder))
        results: list[AdapterLoaded | AdapterFailed] = []
        while len(results) < len(sources):
            results += self._core.adapters.advance(0.0)
            if self._core.has_unfinished():
                self._core.step(0.0)
            else:
                time.sleep(0.001)  # for the thread that reads adapters
        if failed := [result for result in results if isinstance(result, AdapterFailed)]:
            raise RuntimeError(failed[0].message)

    def serve(self, arrivals: Sequence[Arrival]) -> list[float]:
        """Serve the requests. Returns the seconds from the arrival of each to its first token."""
        core, skipped, began = self._core, 0.0, time.process_time()
        due, first = list(reversed(arrivals)), dict[str, float]()
        arrived: dict[str, float] = {}
        while due or core.has_unfinished():
            now = time.process_time() - began + skipped
            while due and due[-1].seconds <= now:
                arrival, name = due.pop(), str(next(self._serials))
                arrived[name] = arrival.seconds
                params = SamplingParams(max_tokens=self._tokens, temperature=0.0, ignore_eos=True)
                core.add_request(
                    EngineRequest(
                        request_id=name, prompt_token_ids=arrival.prompt, params=params, adapter=arrival.adapter,
                        arrival_time=now,
                    )
                )  # fmt: skip
            if failed := core.adapters.advance(now):
                raise RuntimeError(f"{failed[0]}")
            for output in core.step(now):
                if output.has_failed:
                    raise RuntimeError(f"request {output.request_id} ended with {output.message}")
                if output.new_token_ids and output.request_id not in first:
                    first[output.request_id] = time.process_time() - began + skipped
            if not core.has_unfinished() and due:
                skipped += max(0.0, due[-1].seconds - now)
        return [first[name] - seconds for name, seconds in arrived.items()]


def draw(options: argparse.Namespace, rate: float, seed: int, used: int) -> list[Arrival]:
    """Draw requests at this rate, for the first `used` adapters. Rate 0: all arrive at once."""
    random, seconds = Random(seed), 0.0
    weights = [1 / rank for rank in range(1, used + 1)]
    arrivals = []
    for adapter in random.choices(range(1, used + 1), weights, k=options.requests):
        seconds += random.expovariate(rate) if rate else 0.0
        prompt = [random.randrange(256) for _ in range(options.prompt_tokens)]
        arrivals.append(Arrival(seconds, adapter, prompt))
    return arrivals


def find_p95(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=20)[-1]


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `adapter-slots`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench adapter-slots", description=__doc__)
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen3-0.6b", help="the model's sizes")
    parser.add_argument("--adapters", type=int, default=64, help="number of adapters")
    parser.add_argument("--slots", type=int, nargs="+", default=[8], help="numbers of slots to compare with all")
    parser.add_argument("--used", type=int, nargs="+", help="numbers of adapters that get requests; default: all")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument("--rows", type=int, default=16, help="of a batch, at most")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--requests", type=int, default=200, help="in each round")
    parser.add_argument("--load", type=float, nargs="+", default=[0.5], help="parts of the requests/s when all wait")
    parser.add_argument("--rounds", type=int, default=3, help="each measures all numbers of slots at all loads")
    options = parser.parse_args(argv)
    options.used = options.used or [options.adapters]
    if max(options.used) > options.adapters:
        parser.error("--used is larger than --adapters")
    report = partial(print, flush=True)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        folder.mkdir()
        write_model(folder, options.model_shape, torch.bfloat16)
        sources = write_adapters(folder, Path(name), options.adapters, options.rank)
        engines = {slots: Engine(folder, sources, slots, options) for slots in [*options.slots, options.adapters]}
        whole = engines[options.adapters]
        for engine in engines.values():  # an adapter's first loading includes a trial
            engine.serve([Arrival(0.0, adapter, [1]) for adapter in range(1, options.adapters + 1)])
        at_once = draw(options, 0.0, -2, options.adapters)
        began = time.process_time()
        whole.serve(at_once)
        capacity = len(at_once) / (time.process_time() - began)
        report(f"event=capacity requests_per_second={capacity:.2f}")
        for load, used in itertools.product(options.load, options.used):
            found: dict[int, list[list[float]]] = {slots: [] for slots in engines}
            for round in range(options.rounds):
                arrivals = draw(options, load * capacity, round, used)
                for slots in engines if round % 2 else reversed(engines):
                    found[slots].append(engines[slots].serve(arrivals))
                p95s = " ".join(f"{slots}={find_p95(each[-1]):.3f}" for slots, each in found.items())
                report(f"event=measured load={load} used={used} round={round} p95_seconds_by_slots {p95s}")
            for slots, rounds in found.items():
                ratios = [find_p95(a) / find_p95(b) for a, b in zip(rounds, found[options.adapters], strict=True)]
                results[f"load {load}, {used} used, {slots} slots"] = {
                    "p50_seconds": round_to_ms(statistics.median(map(statistics.median, rounds))),
                    "p95_seconds": round_to_ms(statistics.median(map(find_p95, rounds))),
                    "p95_of_all_loaded": round_to_ms(statistics.median(ratios)),
                }
    report(json.dumps(results | vars(options) | {"capacity": round_to_ms(capacity)}))
    return 0


def round_to_ms(number: float) -> float:
    return round(number, 3)
