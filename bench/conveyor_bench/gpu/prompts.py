"""The stage `prompts` measures the time to the first token on an idle engine, and how prompts slow down decodes."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.gpu.device import Ceilings, measure_ceilings
from conveyor_bench.gpu.models import timed_core, write_config
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Batch, Sizes
from conveyor_bench.gpu.throughput import build_config
from conveyor_bench.gpu.workloads import batch_requests, least_seconds, run_requests
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.request import EngineRequest

_TIMES = 9
_STEPS = 30  # decode steps: first without prompts, then with one prompt in each


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    ceilings = measure_ceilings(device, dtype, sizes.copied_bytes, sizes.product_width)
    for shape in (sizes.small, sizes.large):
        longest = max(*sizes.first_tokens, sizes.beside.input_tokens + sizes.beside.output_tokens)
        lengths = [(longest, 1)] * (sizes.beside.requests + 2)
        with tempfile.TemporaryDirectory() as folder:
            core, seconds, log = timed_core(build_config(write_config(Path(folder), shape), sizes, [lengths]))
        results.row("start", shape=shape, seconds=seconds, said="; ".join(log))
        for tokens in sizes.first_tokens:
            results.row("first tokens", shape=shape, tokens=tokens, **_first_token(core, shape, tokens, ceilings))
        results.row("steps", shape=shape, **_beside_decodes(core, shape, sizes.beside, sizes.one.input_tokens))
        del core
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _first_token(core: EngineCore, shape: str, tokens: int, ceilings: Ceilings) -> dict[str, object]:
    """Measure one prompt.

    Its limit is the least time of its products, or of one decode step (which reads all weights) if that is longer.
    """
    assert isinstance(core.executor, GenerateRunner)
    vocab_size = SHAPES[shape]["vocab_size"]
    seconds = [
        run_requests(core, batch_requests(Batch(1, tokens, 1), vocab_size, f"{tokens}.{number}.")).seconds
        for number in range(_TIMES)
    ]
    limit = max(least_seconds(core.executor.model, [(tokens, 2)], ceilings))
    median = statistics.median(seconds)
    return {"ms": 1000 * median, "slowest_ms": 1000 * max(seconds), "of_limit": limit / median}


def _beside_decodes(core: EngineCore, shape: str, batch: Batch, prompt: int) -> dict[str, object]:
    """Return the milliseconds of a step in which all rows decode, and of a step that also computes a prompt."""
    vocab_size = SHAPES[shape]["vocab_size"]
    for request in batch_requests(batch, vocab_size, "row"):
        core.add_request(request)
    while core.stats().step_num_tokens != batch.requests:
        core.step(time.monotonic())
    plain = _time_steps(core, iter(()))
    arriving = batch_requests(replace(batch, requests=_STEPS, input_tokens=prompt, output_tokens=1), vocab_size, "new")
    beside = _time_steps(core, iter(arriving))
    for request in batch_requests(batch, vocab_size, "row"):
        core.abort(request.request_id)
    while core.has_unfinished():
        core.step(time.monotonic())
    rows = {"rows": batch.requests, "prompt_tokens": prompt}
    return {**rows, "decodes_ms": plain, "with_a_prompt_ms": beside}


def _time_steps(core: EngineCore, arriving: Iterator[EngineRequest]) -> float:
    """Return the milliseconds of one step."""
    started = time.monotonic()
    for _ in range(_STEPS):
        if (request := next(arriving, None)) is not None:
            core.add_request(request)
        core.step(time.monotonic())
    return 1000 * (time.monotonic() - started) / _STEPS
