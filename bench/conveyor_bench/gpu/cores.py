"""The stage `cores` repeats `nano` on few CPU cores, because pods of an engine on a GPU have a limit of CPUs."""

import multiprocessing
import os
from dataclasses import replace

from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes


class _OfCores(Results):
    """The stage's file, with the number of cores in each row."""

    def __init__(self, results: Results, cores: int) -> None:
        self.path, self._cores = results.path, cores

    def row(self, table: str, **columns: object) -> None:
        super().row(table, cores=self._cores, **columns)


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage. Each number of cores has its own process, whose threads all begin on these cores."""
    for cores in sizes.cores:
        process = multiprocessing.get_context("spawn").Process(target=_run_on, args=(results, sizes, cores))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"with {cores} cores, the process ended with exit code {process.exitcode}")


def _run_on(results: Results, sizes: Sizes, cores: int) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    from conveyor_bench.gpu.throughput import run_nano  # torch counts the cores when it is imported

    run_nano(_OfCores(results, cores), replace(sizes, kv_cache_dtypes=("auto",)))
