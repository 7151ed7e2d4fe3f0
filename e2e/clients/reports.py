"""Summarises a client's own report in one phrase.

Raises `ClientFailed` if a part failed. Pure, except for reading files.

Load generators exit with 0 even if all their requests have failed, so their reports are read.
"""

import json
from pathlib import Path
from typing import Any


class ClientFailed(Exception):
    """The client did not get what it requested."""


def named_checks(output: str, _: Path) -> str:
    """Return how many checks passed, for the programs of `programs/`: they end at the first check that fails."""
    passed = [line for line in output.splitlines() if line.startswith("passed: ")]
    if not passed:
        raise ClientFailed(f"no check was run:\n{output}")
    return f"{len(passed)} of {len(passed)} checks"


def guidellm(_: str, out: Path) -> str:
    (benchmark,) = json.loads((out / "report.json").read_text())["benchmarks"]
    counts = benchmark["scheduler_metrics"]["requests_made"]
    return _all_of(counts["successful"], counts["total"], counts)


def aiperf(_: str, out: Path) -> str:
    report = json.loads((out / "profile_export_aiperf.json").read_text())
    passed, requested = (
        int(report.get(name, {"avg": 0})["avg"]) for name in ("request_count", "completed_request_count")
    )
    return _all_of(passed, requested, report["error_summary"])


def vllm_bench(_: str, out: Path) -> str:
    """Return how many requests succeeded. The reports of embeddings and ranks count no failures, but list errors."""
    report = json.loads((out / "report.json").read_text())
    return _all_of(report["completed"], len(report["errors"]), [error for error in report["errors"] if error])


def lm_eval(_: str, out: Path) -> str:
    (path,) = out.rglob("results_*.json")
    samples = json.loads(path.read_text())["n-samples"]["conveyor_generate"]
    return _all_of(samples["effective"], samples["original"], samples)


def _all_of(passed: int, requested: int, details: Any) -> str:
    if not passed == requested > 0:
        raise ClientFailed(f"{passed} of {requested} requests succeeded: {details}")
    return f"{passed} of {requested} requests"
