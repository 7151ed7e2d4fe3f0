"""Runs the modes in virtual time: the product's core and scheduler with a cost model, with all 1,000 requests.

Used by `command`, and by `measured` with the cost that it fits. The results are the same on every machine.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from conveyor_bench.modes.cost import DEVICES, SHAPES, Cost, Roofline
from conveyor_bench.modes.figures import Observed
from conveyor_bench.modes.requests import CAPS, PROMPT_TOKENS, latency_requests, throughput_requests
from conveyor_bench.modes.running import VirtualClock, VirtualExecutor, run_requests
from conveyor_bench.modes.systems import CONTINUOUS_RESERVED, MODES, Memory, Mode, build_config
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.wire.request import EngineRequest, ModelFacts

BATCH_LIMIT = 256  # vLLM's default on these devices
STEP_TOKENS = 8192  # the engine's default on a GPU
REQUESTS = 1000
LATENCY_REQUESTS = 100
RATES = (1.0, 4.0)  # requests per second
LIMITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_VOCABULARY = 1000
_BLOCK_SIZE = 16
Figures = dict[str, float]


def run_mode(
    mode: Mode, cost: Cost, memory: Memory, requests: Sequence[EngineRequest], longest: int, step_tokens: int
) -> Figures:
    """Return one mode's figures. `longest`: maximum tokens of a request, which closed batches reserve."""
    facts = ModelFacts(
        task="generate",
        max_model_len=longest,
        vocab_size=_VOCABULARY,
        dtype="bfloat16",
        device="virtual",
        attention_backend="virtual",
        num_kv_blocks=memory.kv_tokens // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        max_num_seqs=memory.limit(mode, longest),
        max_num_batched_tokens=step_tokens,
    )
    clock, observed = VirtualClock(), Observed()
    executor = VirtualExecutor(facts, cost, clock)
    core = EngineCore(build_config(mode, facts, len(requests), model=""), executor)
    for _ in run_requests(core, clock, requests, observed):
        pass
    figures = {**observed.figures(), "batch_limit": facts.max_num_seqs}
    if isinstance(cost, Roofline):
        figures["flops_utilisation"] = cost.flops_utilisation(executor.total, observed.seconds)
    return figures


def run_throughput(cost: Cost, memory: Memory, step_tokens: int, number: int) -> dict[str, Any]:
    """Return figures for every mode at every cap, the ratios, and the factors of each ratio."""
    modes: dict[str, dict[str, Figures]] = {name: {} for name in MODES}
    policy: dict[str, Figures] = {}
    for cap in CAPS:
        requests, longest = throughput_requests(number, cap, _VOCABULARY), PROMPT_TOKENS + cap
        for name, mode in MODES.items():
            modes[name][str(cap)] = run_mode(mode, cost, memory, requests, longest, step_tokens)
        policy[str(cap)] = run_mode(CONTINUOUS_RESERVED, cost, memory, requests, longest, step_tokens)
    return {"modes": modes, **compare(modes, policy)}


def compare(modes: dict[str, dict[str, Figures]], policy: dict[str, Figures]) -> dict[str, Any]:
    """Return the ratio of Continuous to Static by cap, and its factors: policy (with Static's places) and memory."""
    speed = "output_tokens_per_second"
    caps = modes["continuous"]
    parts = {
        cap: {
            "policy": policy[cap][speed] / modes["static"][cap][speed],
            "memory": caps[cap][speed] / policy[cap][speed],
        }
        for cap in caps
    }
    ratios = {cap: caps[cap][speed] / modes["static"][cap][speed] for cap in caps}
    return {"ratios": ratios, "decomposition": parts, "continuous_with_places_of_static": policy}


def run_latency(cost: Cost, memory: Memory, step_tokens: int, rate: float, number: int) -> dict[str, Figures]:
    """Return figures for every mode with Poisson arrivals."""
    requests, longest = latency_requests(number, rate, _VOCABULARY), PROMPT_TOKENS + CAPS[-1]
    return {name: run_mode(mode, cost, memory, requests, longest, step_tokens) for name, mode in MODES.items()}


def run_limits(cost: Cost, memory: Memory, step_tokens: int, number: int) -> dict[str, Figures]:
    """Return figures of Continuous for each batch limit, with outputs up to 1,536 tokens.

    Each run has as many requests as eight batches hold, but at least 50 and at most `number`.
    """
    longest = PROMPT_TOKENS + CAPS[-1]
    by_limit = {}
    for limit in LIMITS:
        requests = throughput_requests(min(number, max(50, 8 * limit)), CAPS[-1], _VOCABULARY)
        limited = Memory(memory.kv_tokens, limit)
        by_limit[str(limit)] = run_mode(MODES["continuous"], cost, limited, requests, longest, step_tokens)
    return by_limit


def run_system(names: tuple[str, str], number: int, latency_number: int) -> dict[str, Any]:
    """Return all figures for one device and one model."""
    cost = Roofline(DEVICES[names[0]], SHAPES[names[1]])
    memory = Memory(cost.kv_tokens, BATCH_LIMIT)
    return {
        "kv_tokens": cost.kv_tokens,
        **run_throughput(cost, memory, STEP_TOKENS, number),
        "latency": {str(rate): run_latency(cost, memory, STEP_TOKENS, rate, latency_number) for rate in RATES},
        "limits": run_limits(cost, memory, STEP_TOKENS, number),
    }


def run_all(number: int, latency_number: int, processes: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Return figures for all devices and models.

    At the top level, `modes`, `ratios` and `latency` are for Anyscale's pair, which is the first.
    """
    pairs = [(device, shape) for shape in SHAPES for device in DEVICES]
    systems = {}
    with ProcessPoolExecutor(processes) as pool:
        runs = pool.map(partial(run_system, number=number, latency_number=latency_number), pairs)
        for (device, shape), result in zip(pairs, runs, strict=True):
            systems[f"{device}, {shape}"] = result
            ratios = " ".join(f"ratio_{cap}={ratio:.2f}" for cap, ratio in result["ratios"].items())
            report(f"event=simulated device={device} model={shape} {ratios}")
    first = next(iter(systems.values()))
    return {**first, "where": next(iter(systems)), "systems": systems, "method": method(number)}


def method(number: int) -> str:
    """Return a description of the method."""
    device = DEVICES["A100-40G"]
    return (
        f"{number} requests at once, prompts of 512 tokens, outputs exponential with mean 128 kept up to the cap, end "
        f"of sequence ignored. The product's core and scheduler in virtual time. A step takes "
        f"{device.host_seconds * 1000:g} ms, plus for the linear layers and for attention each the longer of its "
        f"arithmetic at {device.flops_share:.0%} of the device's dense 16-bit rate and its reading at "
        f"{device.bandwidth_share:.0%} of its bandwidth. {device.memory_share:.0%} of the memory holds weights and KV "
        f"cache. Static and Dynamic have the places that the KV cache holds if every request is the longest; all modes "
        f"have at most {BATCH_LIMIT}; None has one."
    )
