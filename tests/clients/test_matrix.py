"""Tests that the client matrix is in the documentation, and that a client fails if it gets less than it requested."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conveyor_api.resource import InferenceService
from e2e.clients import reports, runner
from e2e.clients.__main__ import SERVICES
from e2e.clients.matrix import CLIENTS, Client, Task
from e2e.clients.reports import ClientFailed
from e2e.clients.runner import Target
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
def test_all_that_was_asked_must_succeed(judge: Any, tmp_path: Path) -> None:
    assert judge(tmp_path, 20) == "20 of 20 requests"


@pytest.mark.parametrize("judge", [guidellm, aiperf, lm_eval, vllm_bench])
@pytest.mark.parametrize("successful", [0, 19])
def test_a_failed_request_is_a_failed_client(judge: Any, successful: int, tmp_path: Path) -> None:
    with pytest.raises(ClientFailed):
        judge(tmp_path, successful)


def test_a_program_must_name_its_checks(tmp_path: Path) -> None:
    assert reports.named_checks("passed: a\nx\npassed: b\n", tmp_path) == "2 of 2 checks"
    with pytest.raises(ClientFailed):
        reports.named_checks("nothing", tmp_path)


def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> str:
    """Return what a client that is one line of shell is reported to have passed."""
    monkeypatch.setattr(runner, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(runner, "install", lambda _: tmp_path)
    client = Client("any", ("any==1",), ("/bin/sh", "-c", script), "nothing")
    return runner.run(client, Target("http://x/a/b/v1", "m", tmp_path))


def test_a_client_sees_its_target_and_nothing_of_us(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://proxy")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    script = 'test -z "$HTTP_PROXY$OPENAI_API_KEY" && echo "passed: {base} {url} {model}" > seen && cat seen'
    assert tried(monkeypatch, tmp_path, script) == "1 of 1 checks"
    assert (tmp_path / "seen").read_text() == "passed: http://x/a/b http://x/a/b/v1 m\n"


def test_an_environment_is_shared_by_tasks_and_goes_with_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(runner, "FOLDER", tmp_path)
    monkeypatch.setattr(runner, "_step", lambda *_: None)
    first = runner.install(Client("any", ("any==1",), (), "nothing"))
    other = runner.install(Client("any more", ("any-more==1",), (), "nothing"))
    assert runner.install(Client("any, embeddings", ("any==1",), (), "nothing")) == first
    assert runner.install(Client("any", ("any==2",), (), "nothing")) not in (first, other)
    assert (first.exists(), other.exists()) == (False, True)


def test_a_client_that_ends_badly_has_failed_with_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ClientFailed, match="any ended with 3:\npassed: a\nbut then"):
        tried(monkeypatch, tmp_path, "echo passed: a; echo but then >&2; exit 3")
