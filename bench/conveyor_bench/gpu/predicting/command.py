"""`python -m conveyor_bench gpu --predict`: the rate that nano-vllm's bench should reach, before a GPU has run it.

The registers and the shared memory of decode attention come from the compiler. `tails` simulates its plan, to find how
much bandwidth attention loses until its last block ends. All other inputs are in `constants`. The last line is JSON.
"""

import json
from functools import partial
from typing import Final

from conveyor_bench.gpu.predicting.compiled import compile_decodes
from conveyor_bench.gpu.predicting.constants import (
    AFTER,
    BARS,
    BEFORE,
    DECODES_BEFORE,
    FRACTIONS,
    PARTS,
    QWEN3_06B,
    DecodeKernel,
    Kernels,
    Part,
)
from conveyor_bench.gpu.predicting.model import Prediction, System, draw_lengths, predict
from conveyor_bench.gpu.predicting.tails import count_blocks_at_once, find_efficiency

_SCALE_BYTES: Final = 4
_ITEM_BYTES: Final = {"bfloat16": 2, "fp8": 1, "int8": 1}
_MEASURED: Final = {  # docs/benchmarks.md, 2026-11-27, the second of two runs
    "h200": {"bfloat16": 24_735, "fp8": 30_202, "int8": 30_806},
    "h100": {"bfloat16": 19_345, "fp8": 26_533},
}
_BATCHES: Final = {
    "256 rows of 150 to 1,550": [150 + 1400 * row // 255 for row in range(256)],
    "64 rows of 900 to 2,000": [900 + 1100 * row // 63 for row in range(64)],
    "16 rows of 1,500": [1500] * 16,
    "255 rows of 500, one of 32,768": [500] * 255 + [32_768],
}


def run(device: str) -> int:
    """Print the prediction for this device. Returns 1 if a bar is missed."""
    part = PARTS[device]
    kernels = {("before", "bfloat16"): DECODES_BEFORE}
    kernels |= {("today", name): kernel for name, kernel in compile_decodes(part.capability).items()}
    print(
        f"decode attention, blocks at once on a processor and share of the bandwidth of a busy {device}, tails included"
    )
    for (age, name), kernel in kernels.items():
        _print_kernel(f"{age}, {name}", name, kernel, part)
    predictions = {
        (age, name, fraction): _predict(part, BEFORE if age == "before" else AFTER, name, kernel, fraction)
        for (age, name), kernel in kernels.items()
        for fraction in FRACTIONS
    }
    _print_parts(predictions)
    ratios = _compare(predictions, _MEASURED.get(device, {}))
    head = predictions["today", "bfloat16", FRACTIONS[0]]
    print(
        json.dumps(
            {
                "device": device,
                "predicted_output_tokens_per_second": round(head.tokens_per_second),
                "of_each": {
                    f"{age} {name} {fraction}": round(found.tokens_per_second)
                    for (age, name, fraction), found in predictions.items()
                },
                "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
                "bars": BARS,
            }
        )
    )
    return 0 if all(ratios[name] >= bar for name, bar in BARS.items()) else 1


def _print_kernel(title: str, name: str, kernel: DecodeKernel, part: Part) -> None:
    print(
        f"  {title:16} {kernel.registers} registers, {kernel.shared_bytes} bytes shared, "
        f"{count_blocks_at_once(part, kernel)} blocks at once"
    )
    for batch, contexts in _BATCHES.items():
        efficiency = find_efficiency(contexts, QWEN3_06B.kv_heads, _key_bytes(name), part, kernel)
        print(f"    {batch:32} {efficiency:.2f}")


def _key_bytes(name: str) -> int:
    return 2 * (QWEN3_06B.head_dim * _ITEM_BYTES[name] + (_SCALE_BYTES if _ITEM_BYTES[name] == 1 else 0))


def _predict(part: Part, kernels: Kernels, name: str, decodes: DecodeKernel, fraction: float) -> Prediction:
    key_bytes = _key_bytes(name)
    tail = partial(find_efficiency, kv_heads=QWEN3_06B.kv_heads, key_bytes=key_bytes, part=part, kernel=decodes)
    system = System(part, QWEN3_06B, kernels, key_bytes, lambda contexts: fraction * tail(contexts))
    return predict(system, draw_lengths())


def _print_parts(predictions: dict[tuple[str, str, float], Prediction]) -> None:
    columns = [key for key in predictions if key[2] == FRACTIONS[0]]
    print(f"\nseconds of nano-vllm's bench, at {FRACTIONS[0]} of the bandwidth")
    print(f"  {'part':26}" + "".join(f"{f'{age}, {name}':>18}" for age, name, _ in columns))
    for name in predictions[columns[0]].parts:
        print(f"  {name:26}" + "".join(f"{predictions[key].parts[name]:18.3f}" for key in columns))
    print(f"  {'sum':26}" + "".join(f"{predictions[key].seconds:18.3f}" for key in columns))


def _compare(predictions: dict[tuple[str, str, float], Prediction], measured: dict[str, int]) -> dict[str, float]:
    """Print tokens a second. Returns the least ratio of today's rate to the rate before, by type of cache."""
    print("\noutput tokens a second")
    ratios: dict[str, float] = {}
    for (age, name, fraction), found in predictions.items():
        ratio = found.tokens_per_second / predictions["before", "bfloat16", fraction].tokens_per_second
        line = f"  {age:7} {name:9} at {fraction}: {found.tokens_per_second:7.0f}"
        if age == "today":
            ratios[name] = min(ratio, ratios.get(name, ratio))
            line += f", {ratio:.3f} of before (bar {BARS[name]:.2f})"
            line += f"; measured {measured[name]}" if name in measured else ""
        print(line)
    return ratios
