"""The batching modes side by side: one model, the same requests of mixed sizes, all at once."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from msgspec.structs import replace

from conveyor_bench.comparing.systems import Workload
from conveyor_engine.config.engine_config import BatchingMode, EngineConfig, Padding
from conveyor_engine.execution.placement import open_placement
from conveyor_engine.execution.runners.generate import GenerateRunner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.request import EngineRequest, SamplingParams

MODES: dict[str, tuple[BatchingMode, Padding | None]] = {
    "none": ("none", None),
    "static": ("static", "real"),
    "static-packed": ("static", "none"),
    "dynamic": ("dynamic", None),
    "continuous": ("continuous", None),
}
BATCHES = 4  # as many full batches as the requests make


@dataclass(frozen=True, slots=True)
class ModeFigures:
    """One mode's run over all requests."""

    output_tokens_per_second: float
    processor_seconds: float  # of all threads; other programs on the machine change it least
    first_token_seconds: float  # median, of what a client sees
    request_seconds: float  # median
    steps: int
    computed_tokens: int
    padding_share: float  # of all tokens computed
    kv_waste: float  # of the blocks held, averaged over the steps
    closes: dict[str, int]


def mixed_requests(workload: Workload, vocab_size: int) -> list[EngineRequest]:
    """Prompts and answers from an eighth of the workload's sizes to the whole, the same ones each time."""
    random = Random(0)

    def size(largest: int) -> int:
        return random.randint(max(1, largest // 8), largest)

    return [
        EngineRequest(
            request_id=str(number),
            prompt_token_ids=[random.randrange(vocab_size) for _ in range(size(workload.input_tokens))],
            params=SamplingParams(max_tokens=size(workload.output_tokens), temperature=0.0, ignore_eos=True),
        )
        for number in range(workload.requests)
    ]


def measure_modes(
    model: Path, dtype: str, workload: Workload, vocab_size: int, say: Callable[[str], None]
) -> dict[str, dict[str, object]]:
    """The figures of every mode by its name: one warm engine, with a scheduler of its own for each mode."""
    requests = mixed_requests(workload, vocab_size)
    config = _build_config(model, dtype, workload)
    core = EngineCore(config, GenerateRunner(config, open_placement(config)))
    figures: dict[str, dict[str, object]] = {}
    for name, (mode, padding) in MODES.items():
        facts = replace(core.facts, max_num_seqs=1) if mode == "none" else core.facts
        core.scheduler = Scheduler(dataclasses.replace(config, batching_mode=mode, padding=padding), facts)
        figures[name] = asdict(_measure(core, requests))
        say(f"event=measured mode={name} " + " ".join(f"{key}={value}" for key, value in figures[name].items()))
    return figures


def _build_config(model: Path, dtype: str, workload: Workload) -> EngineConfig:
    """Places for a quarter of the requests, and the KV blocks to fill them."""
    longest = workload.input_tokens + workload.output_tokens
    max_num_seqs = max(1, workload.requests // BATCHES)
    return EngineConfig(
        model=str(model),
        device="cpu",
        dtype=dtype,  # type: ignore[arg-type]  # argparse has checked it
        max_model_len=longest,
        max_num_seqs=max_num_seqs,
        max_num_queued_requests=workload.requests,
        num_kv_blocks=max_num_seqs * -(-longest // 16),
        num_threads=torch.get_num_threads(),
    )


def _measure(core: EngineCore, requests: list[EngineRequest]) -> ModeFigures:
    started, processor_started = time.monotonic(), time.process_time()
    for request in requests:
        core.add_request(request)
    core.drain()  # so that a batch which is not full does not wait for the end of its window
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    num_computed = 0
    while core.has_unfinished():
        outputs = core.step(time.monotonic())
        now = time.monotonic() - started
        num_computed += core.stats().step_num_tokens
        for output in outputs:
            first.setdefault(output.request_id, now)
            last[output.request_id] = now
    processor_seconds = time.process_time() - processor_started
    stats = core.stats()
    assert stats.generation_tokens == sum(r.params.max_tokens for r in requests if r.params is not None)
    return ModeFigures(
        output_tokens_per_second=round(stats.generation_tokens / max(last.values()), 2),
        processor_seconds=round(processor_seconds, 1),
        first_token_seconds=round(statistics.median(first.values()), 2),
        request_seconds=round(statistics.median(last.values()), 2),
        steps=stats.num_steps,
        computed_tokens=num_computed,
        padding_share=round(stats.padding_tokens / num_computed, 3),
        kv_waste=round(1 - stats.kv_live_token_steps / stats.kv_allocated_token_steps, 3),
        closes=dict(stats.batch_close_reasons),
    )
