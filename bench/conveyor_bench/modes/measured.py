"""Measures the modes on this machine: the engine with a model of random weights, and transformers' static `generate`.

Used by `command`. A cell has one limit on the length of outputs (a cap), or one rate of arrivals. All systems of a
cell run in alternating slices, on one thread. Each system's clock counts only its own processor seconds. So other load
on the machine affects all systems alike and is not counted. Each cell has a process with its own models, and several
cells run in parallel.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from conveyor_bench.comparing.checks import check_tokens
from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.comparing.systems import HfStatic, write_model
from conveyor_bench.modes.cost import Fitted, StepCounts
from conveyor_bench.modes.figures import Answer, Observed, spread
from conveyor_bench.modes.requests import CAPS, PROMPT_TOKENS, latency_requests, output_tokens, throughput_requests
from conveyor_bench.modes.running import ProcessorClock, RecordingExecutor, run_requests
from conveyor_bench.modes.systems import CONTINUOUS_RESERVED, MODES, Memory, Mode, build_config, limit_facts
from conveyor_bench.modes.virtual import Figures, compare, run_mode
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution.machine import cpu_has_bfloat16
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import EngineRequest

SHAPE = "modes"
MEMORY = Memory(kv_tokens=8192, batch_limit=32)
# With a CPU's default of 1,024, prompts of 512 tokens would count as long, and hold blocks while their chunks wait.
STEP_TOKENS = 2048
LATENCY_REQUESTS = 60
# Rates of arrivals, as shares of the rate that Continuous completes with outputs up to 1,536 tokens. They are as far
# apart as `virtual.RATES`.
LOADS = (0.25, 1.0)
TRANSFORMERS = "transformers"
_RESERVED = "continuous-reserved"
_SYSTEMS = {**MODES, _RESERVED: CONTINUOUS_RESERVED}
_FIT_CAP = 512  # the cost model is fitted to the steps with this cap, and predicts the ratios for all caps
_LONGEST = PROMPT_TOKENS + CAPS[-1]
_SLICE_SECONDS = 1.0
Steps = list[tuple[StepCounts, float]]


@dataclass(slots=True)
class Run:
    """The run of one system in a cell."""

    clock: ProcessorClock = field(default_factory=ProcessorClock)
    observed: Observed = field(default_factory=Observed)
    steps: Steps = field(default_factory=list)
    executor_seconds: float = 0.0

    def engine(
        self, runner: GenerateRunner, mode: Mode, requests: Sequence[EngineRequest], longest: int
    ) -> Iterator[None]:
        """Run requests in the engine. Yields after each step."""
        facts = limit_facts(runner.facts, MEMORY.limit(mode, longest), longest)
        executor = RecordingExecutor(runner, facts)
        core = EngineCore(build_config(mode, facts, len(requests), model="", device="cpu"), executor)
        for _ in run_requests(core, self.clock, requests, self.observed):
            if executor.counts is not None:
                self.steps.append((executor.counts, self.observed.step_seconds))
                executor.counts = None
            yield
        self.executor_seconds = executor.seconds

    def transformers(self, system: HfStatic, requests: Sequence[EngineRequest], places: int) -> Iterator[None]:
        """Run batches in order of arrival, each until its longest answer is done. Yields after each forward pass."""
        for start in range(0, len(requests), places):
            batch, began = requests[start : start + places], self.clock.now()
            prompts = [list(request.prompt_token_ids) for request in batch]
            for _ in system.start(prompts, max(map(output_tokens, batch))):
                yield
            for request in batch:
                ended, tokens = self.clock.now(), output_tokens(request)
                self.observed.answers[request.request_id] = Answer(0.0, began, ended, ended, tokens)
        self.observed.seconds = self.clock.now()


def take_turns(runs: Sequence[tuple[ProcessorClock, Iterator[None]]]) -> None:
    """Let each system run for a slice, one after the other, until all are done."""
    waiting = deque(runs)
    while waiting:
        clock, steps = waiting.popleft()
        clock.resume()
        until, ended = clock.now() + _SLICE_SECONDS, True
        for _ in steps:
            if clock.now() >= until:
                ended = False
                break
        clock.pause()
        if not ended:
            waiting.append((clock, steps))


def transformers_figures(answers: Sequence[Answer], seconds: float, places: int, longest_tokens: int) -> Figures:
    """Compute the figures of transformers from the lengths.

    All prompts have the same length, and finished rows continue until the longest answer of the batch is complete.
    """
    useful = computed = live = held = rows = 0
    for start in range(0, len(answers), places):
        lengths = [answer.tokens for answer in answers[start : start + places]]
        longest = max(lengths)
        useful += sum(PROMPT_TOKENS + length - 1 for length in lengths)
        computed += len(lengths) * (PROMPT_TOKENS + longest - 1)
        live += sum(length * PROMPT_TOKENS + length * (length - 1) // 2 for length in lengths)
        held += len(lengths) * (longest * PROMPT_TOKENS + longest * (longest - 1) // 2)
        rows += longest
    return {
        **spread(answers, seconds),
        "padding_waste": 1 - useful / computed,
        "kv_waste": 1 - live / held,
        "kv_waste_if_reserved": 1 - live / (places * rows * longest_tokens),
        "utilisation": sum(answer.tokens for answer in answers) / (places * rows),
        "most_running": places,
        "batch_limit": places,
    }


def run_cell(
    runners: Mapping[str, GenerateRunner], peer: HfStatic | None, requests: Sequence[EngineRequest], longest: int
) -> tuple[dict[str, Figures], dict[str, Run]]:
    """Run all systems with the same requests. Returns their figures and their runs."""
    runs = {name: Run() for name in runners}
    turns = [
        (runs[name].clock, runs[name].engine(runner, _SYSTEMS[name], requests, longest))
        for name, runner in runners.items()
    ]
    places = MEMORY.limit(MODES["static"], longest)
    if peer is not None:
        runs[TRANSFORMERS] = Run()
        turns.append((runs[TRANSFORMERS].clock, runs[TRANSFORMERS].transformers(peer, requests, places)))
    take_turns(turns)
    figures = {name: runs[name].observed.figures() for name in runners}
    if peer is not None:
        observed = runs[TRANSFORMERS].observed
        figures[TRANSFORMERS] = transformers_figures(list(observed.answers.values()), observed.seconds, places, longest)
    return figures, runs


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is written once. The process of each cell opens it."""

    folder: Path
    dtype: str

    def open_runners(self, names: Sequence[str]) -> dict[str, GenerateRunner]:
        """Open a runner with its own cache for each system, on this process's only thread."""
        torch.set_num_threads(1)
        return {name: open_runner(self.folder, self.dtype) for name in names}


def measure(number: int, latency_number: int, pool: Executor, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure everything in the processes of `pool`. Also returns what the cost model predicts for this machine."""
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    check_tokens({"hf-static": HfStatic})
    dtype = "bfloat16" if cpu_has_bfloat16() else "float32"
    cells: dict[str, dict[str, Figures]] = {name: {} for name in (*_SYSTEMS, TRANSFORMERS)}
    runs: dict[int, dict[str, Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), SHAPE, getattr(torch, dtype))
        model = Model(Path(folder), dtype)
        for cap, (figures, runs[cap]) in zip(CAPS, pool.map(partial(measure_cap, model, number), CAPS), strict=True):
            for name, each in figures.items():
                cells[name][str(cap)] = each
                report(f"event=measured mode={name} cap={cap} tokens_per_second={each['output_tokens_per_second']:.1f}")
        latency = measure_latency(pool, partial(measure_rate, model, latency_number), cells, report)
    policy = cells.pop(_RESERVED)
    compared = compare(cells, policy)
    for cap, parts in compared["decomposition"].items():
        parts["kernels"] = _speed(cells["static"][cap]) / _speed(cells[TRANSFORMERS][cap])
    return {
        "modes": cells,
        **compared,
        "latency": latency,
        "prediction": predict(number, runs, cells),
        "step": describe_steps(runs),
        "machine": describe_machine(load),
        "where": f"{describe_machine(load)['cpu']}, one thread",
        "method": method(number, dtype),
    }


def measure_cap(model: Model, number: int, cap: int) -> tuple[dict[str, Figures], dict[str, Run]]:
    """Measure all systems with the same requests, whose outputs have at most `cap` tokens."""
    runners, peer = model.open_runners(list(_SYSTEMS)), HfStatic(model.folder, model.dtype)
    run_cell(runners, peer, throughput_requests(2, 4, _vocabulary()), PROMPT_TOKENS + 4)  # warms up all systems
    return run_cell(runners, peer, throughput_requests(number, cap, _vocabulary()), PROMPT_TOKENS + cap)


def measure_rate(model: Model, number: int, rate: float) -> dict[str, Figures]:
    """Measure every mode with Poisson arrivals at this rate per second."""
    runners = model.open_runners(list(MODES))
    run_cell(runners, None, throughput_requests(2, 4, _vocabulary()), PROMPT_TOKENS + 4)
    figures, _ = run_cell(runners, None, latency_requests(number, rate, _vocabulary()), _LONGEST)
    return figures


def open_runner(model: Path, dtype: str) -> GenerateRunner:
    """Open the model on the CPU, with its own KV cache."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # one of two constants
        max_model_len=_LONGEST,
        max_num_seqs=MEMORY.batch_limit,
        max_num_batched_tokens=STEP_TOKENS,
        num_kv_blocks=MEMORY.kv_tokens // 16,
        prefix_caching=False,
        num_threads=1,
    )
    return GenerateRunner(config, open_placement(config))


def measure_latency(
    pool: Executor,
    measured_at: Callable[[float], dict[str, Figures]],
    cells: Mapping[str, Mapping[str, Figures]],
    report: Callable[[str], None],
) -> dict[str, dict[str, Figures]]:
    """Measure every mode with Poisson arrivals. Returns the figures by requests per second and by mode."""
    busy = cells["continuous"][str(CAPS[-1])]
    capacity = _speed(busy) / (busy["output_tokens"] / busy["requests"])
    rates = [round(load * capacity, 3) for load in LOADS]
    by_rate = dict(zip(map(str, rates), pool.map(measured_at, rates), strict=True))
    for rate, modes in by_rate.items():
        for name, each in modes.items():
            report(
                f"event=measured mode={name} rate={rate} ttft_p50={each['ttft_p50']:.2f} p99={each['latency_p99']:.2f}"
            )
    return by_rate


def predict(
    number: int, runs: Mapping[int, Mapping[str, Run]], cells: Mapping[str, Mapping[str, Figures]]
) -> dict[str, Any]:
    """Return every mode's ratio to Static, measured and in virtual time with constants fitted to this machine."""
    fitted = Fitted([step for name in MODES for step in runs[_FIT_CAP][name].steps])
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for cap in CAPS:
        requests, longest = throughput_requests(number, cap, _vocabulary()), PROMPT_TOKENS + cap
        simulated = {
            name: _speed(run_mode(mode, fitted, MEMORY, requests, longest, STEP_TOKENS)) for name, mode in MODES.items()
        }
        ratios[str(cap)] = {}
        for name in MODES:
            measured = _speed(cells[name][str(cap)]) / _speed(cells["static"][str(cap)])
            predicted = simulated[name] / simulated["static"]
            ratios[str(cap)][name] = {
                "measured": measured,
                "predicted": predicted,
                "deviation": predicted / measured - 1,
            }
    worst = max((abs(each["deviation"]) for caps in ratios.values() for each in caps.values()), default=0.0)
    return {"fitted_on_cap": _FIT_CAP, "constants": list(fitted.constants), "ratios": ratios, "worst_deviation": worst}


def describe_steps(runs: Mapping[int, Mapping[str, Run]]) -> dict[str, float]:
    """Return the seconds of a step that decodes one request, and the scheduler's seconds for each step."""
    lone = [seconds for run in runs.values() for counts, seconds in run["none"].steps if counts.tokens == 1]
    all_runs = [run for cell in runs.values() for name, run in cell.items() if name != TRANSFORMERS]
    steps = sum(len(run.steps) for run in all_runs)
    scheduling = sum(run.observed.busy_seconds - run.executor_seconds for run in all_runs) / steps
    decode = sum(lone) / len(lone)
    return {"decode_seconds": decode, "scheduling_seconds": scheduling, "decode_over_scheduling": decode / scheduling}


def describe_machine(load: float) -> dict[str, Any]:
    """Return a description of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return {
        "cpu": names[0] if names else "CPU",
        "processors": os.cpu_count(),
        "load_average": {"before": round(load, 1), "after": round(os.getloadavg()[0], 1)},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def method(number: int, dtype: str) -> str:
    """Return a description of the method."""
    shape = SHAPES[SHAPE]
    return (
        f"{number} requests at once for each cap, prompts of 512 tokens, outputs exponential with mean 128 kept up to "
        f"the cap, end of sequence ignored. A model of random weights ({shape['num_hidden_layers']} layers of "
        f"{shape['hidden_size']}, {dtype}) on one thread. Seconds are those of one processor that the system itself "
        f"used; all systems of a cell alternate in slices of a second. The KV cache holds {MEMORY.kv_tokens} tokens, a "
        f"step {STEP_TOKENS}. "
        f"Static, Dynamic and transformers have the places that it holds if every request is the longest, Continuous "
        f"at most {MEMORY.batch_limit}, None one. Poisson arrivals at {LOADS[0]:.0%} and {LOADS[1]:.0%} of what "
        f"Continuous ends a second with outputs up to {CAPS[-1]}."
    )


def _vocabulary() -> int:
    return int(SHAPES[SHAPE]["vocab_size"])


def _speed(figures: Mapping[str, float]) -> float:
    return figures["output_tokens_per_second"]
