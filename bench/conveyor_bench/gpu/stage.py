"""`python -m conveyor_bench.gpu.stage NAME --out FOLDER`: the process of one stage. Started by `suite`.

The process frees the device's memory by ending. It ends without clean-up, because threads of a peer may still run.
"""

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from conveyor_bench.gpu.results import DONE, Results
from conveyor_bench.gpu.sizes import ON_A_GPU, REHEARSED
from conveyor_bench.gpu.stages import STAGES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    results, started = Results(arguments.out, arguments.stage), time.monotonic()
    try:
        _run(results, arguments)
    except Exception as error:  # any error of a model, a kernel or the device is the stage's result
        traceback.print_exc()
        results.end("failed", time.monotonic() - started, f"{type(error).__name__}: {str(error)[:1000]}")
        return 1
    results.end(DONE, time.monotonic() - started)
    return 0


def _run(results: Results, arguments: argparse.Namespace) -> None:
    from conveyor_bench.gpu.about import describe  # needs torch
    from conveyor_engine.execution.machine import choose_device

    results.begin(describe(arguments.commit))
    sizes = replace(REHEARSED if arguments.rehearse else ON_A_GPU, enforce_eager=arguments.enforce_eager)
    choose_device(sizes.device)
    module, _, function = STAGES[arguments.stage].function.partition(":")
    run: Callable[..., None] = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    run(results, sizes)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
