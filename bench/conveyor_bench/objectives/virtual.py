"""Runs objectives in virtual time: the product's core, scheduler and steering with a cost model.

For `command` and tests. A run with an objective is compared to runs with fixed limits. The results are the same on
every machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from conveyor_bench.modes.cost import Cost, Device, Roofline, Shape
from conveyor_bench.modes.running import VirtualClock, VirtualExecutor
from conveyor_bench.objectives.compared import Comparison, Felt, serve
from conveyor_bench.objectives.shapes import SHAPES, Scale, draw_requests
from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, ModelFacts

VOCABULARY = 1000
DECLARED = (64, 1024)  # rows, and tokens of a step; the tokens are the engine's default on a CPU
FIXED = (
    (8, 64),
    (16, 64),
    (16, 128),
    (24, 96),
    (24, 128),
    (32, 96),
    (32, 128),
    (48, 128),
    (64, 96),
    (64, 128),
    (64, 256),
)
REQUESTS_PER_SECOND = 6.0  # load 1
# 16 cores of a server. Reading the weights bounds a step up to about ten tokens; above that, arithmetic does.
CPU = Device(flops=1.6e12, bytes_per_second=150e9, memory_bytes=64e9)
_QWEN3_600M = Shape(
    layers=28,
    layer_parameters=15_730_000,
    head_parameters=151_936 * 1024,
    embedding_parameters=0,
    query_size=2048,
    kv_size=1024,
)
_COST = Roofline(CPU, _QWEN3_600M)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A device with its model, and the engine's settings."""

    cost: Cost = _COST
    max_num_seqs: int = DECLARED[0]
    max_num_batched_tokens: int = DECLARED[1]
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    graph_sizes: Sequence[int] = ()


def run(system: System, requests: Sequence[EngineRequest]) -> Felt:
    """Run all requests until the last answer."""
    clock, felt = VirtualClock(), Felt()
    facts = build_facts(system)
    executor = VirtualExecutor(facts, system.cost, clock)
    executor.graph_sizes = system.graph_sizes
    core = EngineCore(build_config(system, len(requests)), executor, felt.lines.append, clock=clock.now)
    serve(core, clock, requests, felt)
    return felt


def simulate(seconds: float, objective: float) -> Iterator[Comparison]:
    """Run every shape."""
    for name, shape in SHAPES.items():
        requests = draw_requests(shape, Scale(REQUESTS_PER_SECOND, seconds), 1, VOCABULARY)
        fixed = {
            (rows, tokens): run(System(max_num_seqs=rows, max_num_batched_tokens=tokens), requests)
            for rows, tokens in FIXED
        }
        yield Comparison(name, objective, run(System(inter_token_latency=objective), requests), fixed)


def build_facts(system: System, vocabulary: int = VOCABULARY) -> ModelFacts:
    """Return facts with a KV cache that is always large enough, so that only the limits matter."""
    return ModelFacts(
        task="generate",
        max_model_len=4096,
        vocab_size=vocabulary,
        dtype="bfloat16",
        device="virtual",
        attention_backend="virtual",
        num_kv_blocks=system.max_num_seqs * 256,
        block_size=16,
        max_num_seqs=system.max_num_seqs,
        max_num_batched_tokens=system.max_num_batched_tokens,
    )


def build_config(system: System, num_requests: int) -> EngineConfig:
    """Return a configuration in the mode Continuous."""
    return EngineConfig(
        model="",
        batching_mode="continuous",
        max_num_seqs=system.max_num_seqs,
        max_num_batched_tokens=system.max_num_batched_tokens,
        max_num_queued_requests=num_requests,
        prefix_caching=False,
        warmup=False,
        objective_time_to_first_token_seconds=system.time_to_first_token,
        objective_inter_token_latency_seconds=system.inter_token_latency,
    )
