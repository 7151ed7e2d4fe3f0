"""Tests that the client matrix is in the documentation, and that a client fails if it gets less than it requested."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conveyor_api.resource import InferenceService
from e2e.clients import reports
from e2e.clients.__main__ import SERVICES
from e2e.clients.client import Client, Task
from e2e.clients.matrix import CLIENTS
from e2e.clients.reports import ClientFailed
from e2e.cluster.paths import REPOSITORY


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_each_client_has_its_row_on_the_page(client: Client) -> None:
    page = (REPOSITORY / "docs" / "openai-api.md").read_text()
    assert f"| {client.name} | {client.version} | {client.ran} | " in page


@pytest.mark.parametrize("task", SERVICES)
def test_the_service_of_each_task_is_valid(task: Task) -> None:
    InferenceService.parse(SERVICES[task], known_only=True)


def test_no_client_brings_another_torch() -> None:
    locked = tomllib.loads((REPOSITORY / "uv.lock").read_text())["package"]
    (torch,) = {package["version"] for package in locked if package["name"] == "torch"}
    pins = {pin for client in CLIENTS for pin in client.packages if pin.startswith("torch==")}
    assert pins == {f"torch=={torch}"}


def guidellm(folder: Path, successful: int) -> str:
    counts = {"successful": successful, "errored": 20 - successful, "total": 20}
    report = {"benchmarks": [{"scheduler_metrics": {"requests_made": counts}}]}
    (folder / "report.json").write_text(json.dumps(report))
    return reports.guidellm("", folder)


def aiperf(folder: Path, successful: int) -> str:
    counts = {"request_count": {"avg": float(successful)}} if successful else {}
    report = {**counts, "completed_request_count": {"avg": 20.0}, "error_summary": ["..."]}
    (folder / "profile_export_aiperf.json").write_text(json.dumps(report))
    return reports.aiperf("", folder)


def lm_eval(folder: Path, successful: int) -> str:
    (folder / "m").mkdir()
    samples = {"conveyor_generate": {"original": 20, "effective": successful}}
    (folder / "m" / "results_now.json").write_text(json.dumps({"n-samples": samples}))
    return reports.lm_eval("", folder)


def vllm_bench(folder: Path, successful: int) -> str:
    report = {"completed": successful, "errors": [""] * successful + ["Bad Request"] * (20 - successful)}
    (folder / "report.json").write_text(json.dumps(report))
    return reports.vllm_bench("", folder)


@pytest.mark.parametrize("judge", [guidellm, aiperf, lm_eval, vllm_bench])
def test_every_requested_check_must_succeed(judge: Any, tmp_path: Path) -> None:
    assert judge(tmp_path, 20) == "20 of 20 requests"


@pytest.mark.parametrize("judge", [guidellm, aiperf, lm_eval, vllm_bench])
@pytest.mark.parametrize("successful", [0, 19])
def test_a_failed_request_is_a_failed_client(judge: Any, successful: int, tmp_path: Path) -> None:
    with pytest.raises(ClientFailed):
        judge(tmp_path, successful)
