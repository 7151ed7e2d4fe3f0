"""Measures objectives on this machine, with the real engine and a model of random weights on one thread. For `command`.

The clock counts the processor seconds of this process, so that the time of other programs does not count.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from conveyor_bench.comparing.systems import write_model
from conveyor_bench.modes.running import ProcessorClock
from conveyor_bench.objectives.compared import Comparison, Felt, serve
from conveyor_bench.objectives.shapes import SHAPES, Scale, draw_requests
from conveyor_bench.objectives.virtual import System, build_config, build_facts
from conveyor_engine.config.engine_config import Dtype, EngineConfig
from conveyor_engine.execution.machine import cpu_has_bfloat16
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import EngineRequest, ModelFacts

SHAPE = "modes"
DECLARED = (32, 1024)
FIXED = ((4, 64), (8, 64), (8, 128), (16, 128), (32, 128))
SECONDS = 6.0  # of traffic for each run, by default: about five minutes of a processor for all of them
_PACE, _PACE_REQUESTS, _PACE_RUNS = (8, 64), 40, 3


class Measured:
    """The model of an engine. All runs use it, one after the other."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        dtype: Dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
        write_model(folder, SHAPE, getattr(torch, dtype))
        rows, tokens = DECLARED
        config = EngineConfig(
            model=str(folder), device="cpu", dtype=dtype, max_model_len=4096, max_num_seqs=rows, num_threads=1,
            max_num_batched_tokens=tokens, num_kv_blocks=rows * 256, warmup=False,
        )  # fmt: skip
        self._runner = GenerateRunner(config, open_placement(config))

    @property
    def vocabulary(self) -> int:
        return self._runner.facts.vocab_size

    def run(self, system: System, requests: list[EngineRequest]) -> Felt:
        """Run all requests until the last answer."""
        facts = build_facts(system, self.vocabulary)
        clock, felt = ProcessorClock(), Felt()
        config = replace(build_config(system, len(requests)), device="cpu")
        core = EngineCore(config, _WithFacts(self._runner, facts), felt.lines.append, clock=clock.now)
        clock.resume()
        serve(core, clock, requests, felt)
        clock.pause()
        return felt


class _WithFacts:
    """Wraps a runner and replaces its limits."""

    def __init__(self, runner: GenerateRunner, facts: ModelFacts) -> None:
        self.facts = facts
        self.extra_warmup_tokens, self.graph_sizes = runner.extra_warmup_tokens, runner.graph_sizes
        self.begin, self.free_memory = runner.begin, runner.free_memory


def measure(seconds: float, say: Callable[[str], None]) -> Iterator[Comparison]:
    """Measure every shape.

    A few runs with fixed limits come first. The fastest of them sets load 1, which is its requests per second, and the
    objective, which is 1.5 x the P95 of its time between two tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        measured = Measured(Path(folder))
        requests = draw_requests(SHAPES["step"], Scale(1e6, _PACE_REQUESTS / 1e6), 7, measured.vocabulary)
        paces = [measured.run(_limited(_PACE), requests) for _ in range(_PACE_RUNS)]
        pace = min(paces, key=lambda felt: felt.seconds)  # the first also allocates; other load only slows a run
        rate, objective = len(requests) / pace.seconds, 1.5 * pace.p95("between")
        say(f"event=paced requests_per_second={rate:.2f} objective_ms={objective * 1000:.1f}")
        systems = {f"{rows}x{tokens}": _limited((rows, tokens)) for rows, tokens in FIXED}
        systems["objective"] = replace(_limited(DECLARED), inter_token_latency=objective)
        progress = _Progress(say, len(SHAPES) * len(systems))
        for name, shape in SHAPES.items():
            requests = draw_requests(shape, Scale(rate, seconds), 1, measured.vocabulary)
            felt = [progress.tell(name, limits, measured.run(each, requests)) for limits, each in systems.items()]
            yield Comparison(name, objective, felt[-1], dict(zip(FIXED, felt, strict=False)))


def _limited(limits: tuple[int, int]) -> System:
    return System(max_num_seqs=limits[0], max_num_batched_tokens=limits[1])


class _Progress:
    """Prints a line after each run."""

    def __init__(self, say: Callable[[str], None], num_runs: int) -> None:
        self._say, self._num_runs, self._run, self._began = say, num_runs, 0, time.monotonic()

    def tell(self, shape: str, limits: str, felt: Felt) -> Felt:
        self._run += 1
        elapsed = time.monotonic() - self._began
        self._say(
            f"event=run_over run={self._run}/{self._num_runs} shape={shape} limits={limits} "
            f"p95_ms={felt.p95('between') * 1000:.1f} tokens_per_second={felt.tokens_per_second:.0f} "
            f"elapsed={elapsed:.0f}s left={elapsed / self._run * (self._num_runs - self._run):.0f}s"
        )
        return felt
