"""`python -m conveyor_bench modes`: compares batching modes on Anyscale's requests, in virtual time and measured.

Writes `virtual.json`, `measured.json` and `index.html` into a folder, and the pictures of docs/batching.md.
"""

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from conveyor_bench.modes import page, virtual

SOURCES = ("virtual", "measured")
MEASURED_REQUESTS = 150


def main(argv: Sequence[str]) -> int:
    """Run the command `modes`. Returns 1 if a limit is missed (`find_misses`)."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench modes", description=__doc__)
    parser.add_argument("--only", choices=SOURCES, help="one of the two sources; the other's last file stays")
    parser.add_argument("--out", type=Path, default=Path("build/modes"), help="the folder of the results")
    parser.add_argument("--pictures", type=Path, help="a folder for the pictures too, as docs/batching/ has them")
    parser.add_argument("--requests", type=int, default=virtual.REQUESTS, help="of a throughput cell, in virtual time")
    parser.add_argument("--measured-requests", type=int, default=MEASURED_REQUESTS, help="of a measured cell")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that work beside each other")
    arguments = parser.parse_args(argv)
    for name in ("requests", "measured_requests", "processes"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    report = partial(print, flush=True)
    results = page.read_results(arguments.out)
    sources = (arguments.only,) if arguments.only else SOURCES
    if "virtual" in sources:
        number = arguments.requests
        results["virtual"] = virtual.run_all(number, min(number, virtual.LATENCY_REQUESTS), arguments.processes, report)
    if "measured" in sources:
        from conveyor_bench.modes import measured  # needs torch, which virtual time does not

        number = arguments.measured_requests
        spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(arguments.processes, spawn) as pool:
            results["measured"] = measured.measure(number, min(number, measured.LATENCY_REQUESTS), pool, report)
    page.write_results(arguments.out, results)
    if arguments.pictures:
        page.write_pictures(arguments.pictures, results)
    missed = [line for name, result in results.items() for line in find_misses(name, result)]
    for line in missed:
        report(f"event=bar_missed {line}")
    return 1 if missed else 0


def find_misses(name: str, result: dict[str, Any]) -> list[str]:
    """Return the limits that a source misses, one line each."""
    ratios = list(result["ratios"].values())
    missed = [] if ratios == sorted(ratios) else [f"source={name} the ratio does not grow with the cap: {ratios}"]
    for cap, figures in result["modes"]["continuous"].items():
        if figures["kv_waste"] >= 0.04:
            missed.append(f"source={name} cap={cap} kv_waste={figures['kv_waste']:.3f}")
    if "prediction" in result and result["prediction"]["worst_deviation"] > 0.1:
        missed.append(f"source={name} prediction_deviation={result['prediction']['worst_deviation']:.3f}")
    if "step" in result and result["step"]["decode_over_scheduling"] < 10:
        missed.append(f"source={name} decode_over_scheduling={result['step']['decode_over_scheduling']:.1f}")
    return missed
