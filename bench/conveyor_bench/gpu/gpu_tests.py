"""The stages `tests` and `tasks` run pytest: with the tests marked `gpu`, and with those of other tasks on the GPU.

Each failure is reported immediately.

The repository's configuration names plugins of pytest that may be missing, so pytest gets a configuration that names
none.
"""

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conveyor_bench.gpu.about import REPOSITORY
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes

REHEARSES = "CONVEYOR_REHEARSE_GPU_TESTS"  # if it is set, the tests run on the CPU
FOLDER = "tests/engine"
FILES = (
    "execution/attention/test_8_bit_cache.py",
    "execution/attention/test_triton_backend.py",
    "execution/graphs/test_scored_prompts.py",
    "execution/kernels/test_cut.py",
    "execution/kernels/test_decode_plan.py",
    "execution/kernels/test_uniform.py",
    "execution/models/test_triton_layers.py",
    "execution/kernels/test_packed_product.py",
    "execution/kernels/test_packed_experts.py",
    "execution/models/test_gpu_packing.py",
    "execution/models/test_gpu_experts.py",
    "test_on_gpu.py",
)
FILES_OF_TASKS = (
    "tasks/classify/test_classifiers.py",
    "tasks/custom/test_custom.py",
    "tasks/custom/test_exported.py",
    "tasks/custom/test_hostile_programs.py",
    "tasks/embed/test_embeddings.py",
    "tasks/imageclassify/test_image_classifiers.py",
    "tasks/embed/test_image_embeddings.py",
    "tasks/imagegenerate/test_pictures.py",
    "tasks/transcribe/test_transcripts.py",
)
_MESSAGE_LENGTH = 600
_WORKERS_MAX = 8


class _Collector:
    """A plugin of pytest that reports each failure immediately and counts the other tests."""

    def __init__(self, results: Results) -> None:
        self.counts: Counter[str] = Counter()
        self._results = results

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            self._report(report.nodeid, report.longreprtext)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.counts["failed"] += 1
            self._report(report.nodeid, report.longreprtext)

    def _report(self, test: str, why: str) -> None:
        lines = [line for line in why.splitlines() if line.startswith("E ")] or why.splitlines()[-1:]
        self._results.row("failures", test=test, why=" ".join(lines)[:_MESSAGE_LENGTH])


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage `tests`. Raises RuntimeError if a test fails or none runs."""
    if sizes.device == "cpu":
        os.environ[REHEARSES] = "1"
    chosen = ["-k", sizes.chosen_tests] if sizes.chosen_tests else []
    _run(results, ["-m", "gpu", *chosen, *_paths(FILES)])


def run_tasks(results: Results, sizes: Sizes) -> None:
    """Run the stage `tasks`. Raises RuntimeError if a test fails or none runs."""
    forced = ["-p", "conveyor_bench.gpu.forced_cuda"] if sizes.device == "cuda" else []
    chosen = ["-k", sizes.chosen_tests_of_tasks] if sizes.chosen_tests_of_tasks else []
    _run(results, ["-m", "not nightly", *forced, *chosen, *_paths(FILES_OF_TASKS)])


def _run(results: Results, arguments: Sequence[str]) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(REPOSITORY)
    collector = _Collector(results)
    pytest = importlib.import_module("pytest")  # pytest is not installed with the engine
    plain = ["-c", f"{FOLDER}/gpu.ini", "--rootdir", ".", "--confcutdir", FOLDER, "-p", "no:cacheprovider"]
    pytest.main(["-q", *plain, *_workers(), *arguments], plugins=[collector])
    results.row("tests", **{how: collector.counts[how] for how in ("passed", "failed", "skipped")})
    if collector.counts["failed"] or not collector.counts["passed"]:
        raise RuntimeError(f"{collector.counts['failed']} failed, {collector.counts['passed']} passed")


def _paths(files: Sequence[str]) -> Sequence[str]:
    return [str(Path(FOLDER) / file) for file in files]


def _workers() -> Sequence[str]:
    """Return flags for several workers if pytest-xdist is installed. Most of the time is spent on compiling kernels."""
    if importlib.util.find_spec("xdist") is None or importlib.util.find_spec("execnet") is None:
        return []
    number = min(_WORKERS_MAX, len(os.sched_getaffinity(0)))
    return ["-p", "xdist.plugin", "-n", str(number)]
