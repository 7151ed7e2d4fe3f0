"""Workload D: 32 prompts that begin with the same 512 tokens arrive together, with and without prefix caching."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from conveyor_bench.comparing.systems import Conveyor, Prompts, Workload
from conveyor_bench.comparing.turns import OURS
from conveyor_bench.workloads.rounds import Figures, Limits, measure_engines

REQUESTS, SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 32, 512, 32, 32


def measure_prefix(
    model: Path, dtype: str, vocab_size: int, limits: Limits, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the seconds to the median request's first token, and to the end. Each round has new prompts."""
    sizes = Workload(REQUESTS, SHARED_TOKENS + OWN_TOKENS, OUTPUT_TOKENS)
    systems = {
        OURS: Conveyor(model, dtype, sizes, report),
        "no-prefix-caching": Conveyor(model, dtype, sizes, report, prefix_caching=False),
    }
    workload = {"requests": REQUESTS, "shared": SHARED_TOKENS, "own": OWN_TOKENS, "output_tokens": OUTPUT_TOKENS}
    return {**measure_engines(systems, partial(run, vocab_size), limits, report), "workload": workload}


def random_prompts(vocab_size: int, seed: int) -> Prompts:
    """Build prompts that share their first tokens."""
    random = Random(seed)
    shared = random.choices(range(vocab_size), k=SHARED_TOKENS)
    return [shared + random.choices(range(vocab_size), k=OWN_TOKENS) for _ in range(REQUESTS)]


def run(vocab_size: int, conveyor: Conveyor, seed: int) -> Figures:
    """Run all requests at once, to the end."""
    for prompt in random_prompts(vocab_size, seed):
        conveyor.add(prompt, OUTPUT_TOKENS)
    started, first = time.perf_counter(), dict[str, float]()
    for outputs in conveyor.steps():
        for output in outputs:
            first.setdefault(output.request_id, time.perf_counter() - started)
    return {"first_token_p50": median(first.values()), "all": time.perf_counter() - started}
