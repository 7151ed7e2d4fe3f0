"""`python -m conveyor_bench embed-modes`: compares the modes for embeddings, by window and batch size, in virtual time.

Runs the product's core and scheduler with the roofline of `cost`. Requests arrive as a Poisson process, at shares of
the capacity of each setting. Writes `embeddings.json`, and the picture of docs/batching.md. The results are the same on
every machine.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from conveyor_bench.modes.charts import log_axis_for
from conveyor_bench.modes.cost import DEVICES, Roofline, Shape, StepCounts
from conveyor_bench.modes.figures import Observed
from conveyor_bench.modes.running import VirtualClock, run_requests
from conveyor_engine.config.engine_config import BatchingMode, EngineConfig
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Sample
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.request import EngineRequest, ModelFacts, RequestOutput
from conveyor_engine.wire.step import StepPlan, StepResult
from conveyor_insight.svg import Axis, Series, lines
from conveyor_load.percentiles import percentile

DEVICE = "A100-40G"
BERT_BASE = Shape(
    layers=12,
    layer_parameters=12 * 768**2,
    head_parameters=0,
    embedding_parameters=31_000 * 768,
    query_size=768,
    kv_size=768,
)
TOKENS = (8, 512)
REQUESTS = 4000
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9)  # of a setting's capacity
_STEP_TOKENS = 8192  # the engine's default on a GPU
_VOCABULARY = 1000
_DIMENSIONS = 768
_PICTURE = "virtual-embeddings"


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, which is a line in the picture."""

    mode: BatchingMode
    batch_size: int
    window_seconds: float | None
    colour: int

    @property
    def name(self) -> str:
        """Return the setting's name in the terms of the InferenceService."""
        if self.window_seconds is None:
            return "None" if self.mode == "none" else f"{self.mode.capitalize()} {self.batch_size}"
        window = f"{self.window_seconds:g} s" if self.window_seconds >= 1 else f"{self.window_seconds * 1000:g} ms"
        return f"{self.mode.capitalize()} {self.batch_size}, {window}"


SETTINGS = (
    Setting("none", 1, None, 0),
    Setting("static", 32, 1.0, 1),
    Setting("dynamic", 8, 0.010, 4),
    Setting("dynamic", 32, 0.002, 2),
    Setting("dynamic", 32, 0.010, 6),
    Setting("continuous", 32, None, 3),
)


class Device:
    """Computes nothing. A step advances the clock by its cost.

    The cost assumes that every token of a text attends to the whole text.
    """

    extra_warmup_tokens = ()
    graph_sizes: Sequence[int] = ()

    def __init__(self, facts: ModelFacts, cost: Roofline, clock: VirtualClock) -> None:
        self.facts = facts
        self._cost = cost
        self._clock = clock

    def begin(self, plan: StepPlan) -> Sample:
        tokens = sum(plan.num_tokens)
        counts = StepCounts(tokens, 0, tokens, float(sum(n * n for n in plan.num_tokens)))
        self._clock.wait_until(self._clock.now() + self._cost.seconds(counts))
        result = StepResult(plan.number, [], payloads=[b"vector"] * len(plan.rows))
        return lambda _masks: lambda: result

    def free_memory(self) -> None:
        """Do nothing: there is no memory."""


class Served(Observed):
    """Records the times of requests whose result is a payload."""

    def after_step(self, core: EngineCore, outputs: Sequence[RequestOutput], began: float, ended: float) -> None:
        for output in outputs:
            if output.payload is None:
                raise RuntimeError(f"request {output.request_id} ended with {output.finish_reason}: {output.message}")
            self.answers[output.request_id].last = ended


def draw_requests(number: int, rate: float | None) -> list[EngineRequest]:
    """Return requests with texts of 8 to 512 tokens, with Poisson arrivals or all at once."""
    random, now = Random(number), 0.0
    requests = []
    for index in range(number):
        tokens = random.choices(range(_VOCABULARY), k=random.randint(*TOKENS))
        gap = random.expovariate(1)
        now += 0.0 if rate is None else gap / rate
        requests.append(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=tokens,
                payload=PoolingParams().encode(),
                arrival_time=now,
            )
        )
    return requests


def run(setting: Setting, number: int, rate: float | None) -> dict[str, float]:
    """Run a setting. Returns requests per second, and the P50, P95 and P99 of latency in milliseconds.

    `requests_per_second` is the rate of arrivals. If `rate` is None, all requests arrive at once, and
    `requests_per_second` is the rate of responses.
    """
    facts = ModelFacts(
        task="embed",
        max_model_len=TOKENS[1],
        vocab_size=_VOCABULARY,
        dtype="bfloat16",
        device="virtual",
        attention_backend="virtual",
        num_kv_blocks=0,
        block_size=16,
        max_num_seqs=setting.batch_size,
        max_num_batched_tokens=_STEP_TOKENS,
        of_task=EmbeddingFacts(size=_DIMENSIONS).encode(),
    )
    config = EngineConfig(
        model="",
        batching_mode=setting.mode,
        batching_window_seconds=setting.window_seconds,
        max_num_seqs=setting.batch_size,
        max_num_queued_requests=number,
        warmup=False,
    )
    clock, observed = VirtualClock(), Served()
    core = EngineCore(config, Device(facts, Roofline(DEVICES[DEVICE], BERT_BASE), clock))
    for _ in run_requests(core, clock, draw_requests(number, rate), observed):
        pass
    times = [answer.last - answer.arrival for answer in observed.answers.values()]
    return {
        "requests_per_second": rate or number / observed.seconds,
        **{f"p{share}": 1000 * percentile(times, share) for share in (50, 95, 99)},
    }


def run_all(number: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Return each setting's capacity, and its figures at shares of the capacity."""
    results: dict[str, Any] = {}
    for setting in SETTINGS:
        capacity = run(setting, number, None)["requests_per_second"]
        loads = {f"{share:.0%}": run(setting, number, share * capacity) for share in SHARES}
        results[setting.name] = {**asdict(setting), "capacity": capacity, "loads": loads}
        report(f"event=simulated setting={setting.name.replace(' ', '-')} requests_per_second={capacity:.0f}")
    return {"settings": results, "device": DEVICE, "requests": number, "tokens": TOKENS}


def draw(results: dict[str, Any]) -> str:
    """Draw the P95 of each setting by the arriving requests per second."""
    series = [
        Series(
            name,
            each["colour"],
            [(load["requests_per_second"], load["p95"]) for load in each["loads"].values()],
            [""] * len(each["loads"]),
        )
        for name, each in results["settings"].items()
    ]
    points = [point for one in series for point in one.values]
    return lines(
        "Embeddings: what window and batch size cost and give",
        f"{results['device']}, BERT base, in virtual time. Up: P95 of a request, ms. Right: requests a second",
        series,
        Axis(0.0, 1.05 * max(x for x, _ in points), "requests/s"),
        log_axis_for([y for _, y in points], "ms"),
    )


def main(argv: Sequence[str]) -> int:
    """Run the command `embed-modes`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench embed-modes", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/modes"), help="the folder of the results")
    parser.add_argument("--pictures", type=Path, help="a folder for the picture, as docs/batching/ has it")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each load")
    arguments = parser.parse_args(argv)
    if arguments.requests < 1:
        parser.error("--requests must be at least 1")
    results = run_all(arguments.requests, partial(print, flush=True))
    for folder in (arguments.out, arguments.pictures):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    (arguments.out / "embeddings.json").write_text(json.dumps(results, indent=1) + "\n")
    if arguments.pictures:
        (arguments.pictures / f"{_PICTURE}.svg").write_text(draw(results) + "\n")
    return 0
