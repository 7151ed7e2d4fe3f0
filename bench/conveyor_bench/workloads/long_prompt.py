"""Workload E: while 8 requests decode, a prompt of 2,048 tokens arrives, and a short one right behind it.

The peer is this engine with steps so large that the long prompt is not cut.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from conveyor_bench.comparing.systems import Conveyor, Workload
from conveyor_bench.comparing.turns import OURS
from conveyor_bench.workloads.rounds import Figures, Limits, measure_engines
from conveyor_engine.scheduling.token_budget import LONG_PROMPT_SHARE

DECODING, SHORT_TOKENS, LONG_TOKENS, OUTPUT_TOKENS = 8, 32, 2048, 32
STEPS_BEFORE = 4  # with decodes, before the long prompt arrives


def measure_long_prompt(
    model: Path, dtype: str, vocab_size: int, limits: Limits, report: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the longest gap between two tokens of a decoding request, and the times to both prompts' first tokens.

    Also measures the time of the whole run. Figures are in seconds.
    """
    sizes = Workload(DECODING + 2, LONG_TOKENS, OUTPUT_TOKENS)
    uncut = int(LONG_TOKENS / LONG_PROMPT_SHARE)
    systems = {
        OURS: Conveyor(model, dtype, sizes, report),
        "no-chunks": Conveyor(model, dtype, sizes, report, max_num_batched_tokens=uncut),
    }
    workload = {"decoding": DECODING, "long_prompt": LONG_TOKENS, "short_prompt": SHORT_TOKENS}
    return {**measure_engines(systems, partial(run, vocab_size), limits, report), "workload": workload}


def run(vocab_size: int, conveyor: Conveyor, seed: int) -> Figures:
    """Run all requests to their ends."""
    random = Random(seed)

    def add(num_tokens: int) -> str:
        return conveyor.add(random.choices(range(vocab_size), k=num_tokens), OUTPUT_TOKENS)

    started = time.perf_counter()
    decoding = {add(SHORT_TOKENS) for _ in range(DECODING)}
    times: dict[str, list[float]] = {}
    for number, outputs in enumerate(conveyor.steps()):
        now = time.perf_counter()
        for output in outputs:
            times.setdefault(output.request_id, []).append(now)
        if number == STEPS_BEFORE:
            arrived, long, short = now, add(LONG_TOKENS), add(SHORT_TOKENS)
    gaps = [b - a for name in decoding for a, b in pairwise(times[name])]
    return {
        "longest_gap": max(gaps),
        "long_first_token": times[long][0] - arrived,
        "short_first_token": times[short][0] - arrived,
        "all": time.perf_counter() - started,
    }
