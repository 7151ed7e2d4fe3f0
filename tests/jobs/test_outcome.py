"""Tests how jobs end whose requests fail, or whose address is wrong, and what the log of a job that waits contains."""

import asyncio
import itertools
import json
from pathlib import Path

import pytest
from aiohttp import web
from tests.jobs.running import (
    Json,
    Service,
    answer_prompt,
    answering,
    read_lines,
    refuse,
    run_job,
    start_job,
    wait_job,
    write_input,
)


async def fail_tens(body: Json) -> web.Response:
    """Answer 9 of 10 requests."""
    return refuse(400, "bad") if body["prompt"].endswith("7") else answer_prompt(body)


async def fail_all(_: Json) -> web.Response:
    return refuse(404, "model_not_found")


async def test_a_job_of_which_every_request_failed_does_not_end_well(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 50)
    async with Service(fail_all).serving() as service:
        code, log = await run_job(tmp_path, service.url)
        assert code == 4, log
        assert "event=ended outcome=completed requests=50 completed=0 failed=50" in log
        assert "50 of 50 requests failed, more than --max-failed allows" in log
        assert len(read_lines(tmp_path / "out" / "errors.jsonl")) == 50
        assert json.loads((tmp_path / "out" / "batch.json").read_text())["status"] == "completed"
        again, log = await run_job(tmp_path, service.url)
        assert (again, sum(service.requests.values())) == (4, 50), log
        allowed, log = await run_job(tmp_path, service.url, "--max-failed", "100%")
    assert allowed == 0, log


@pytest.mark.parametrize(("limit", "exit_code"), [("2", 0), ("1", 4), ("10%", 0), ("9%", 4), ("0", 4)])
async def test_more_failures_than_are_allowed_end_a_job_after_all_its_results(
    tmp_path: Path, limit: str, exit_code: int
) -> None:
    ids = write_input(tmp_path / "in.jsonl", 20)
    async with Service(fail_tens).serving() as service:
        code, log = await run_job(tmp_path, service.url, "--max-failed", limit)
    assert code == exit_code, log
    results = [line for name in ("output", "errors") for line in read_lines(tmp_path / "out" / f"{name}.jsonl")]
    assert sorted(line["custom_id"] for line in results) == sorted(ids)


@pytest.mark.parametrize("limit", ["101%", "-1", "5 %", "some"])
async def test_a_limit_of_failures_that_is_none_is_refused(tmp_path: Path, limit: str) -> None:
    code, log = await run_job(tmp_path, "http://127.0.0.1:9", f"--max-failed={limit}")
    assert code == 2
    assert "`max_failed` must be a number of requests, or a percentage such as 5%, not" in log


async def test_a_job_without_its_service_ends_and_names_the_address(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 6)

    async def handle(_: Json) -> web.Response:
        return refuse(404, "service_not_found")

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, f"{service.url}/team-a/qwne", "--service-timeout-seconds", "1")
        assert code == 2, log
        assert f"there is no service at {service.url}/team-a/qwne, after 1 s (service_not_found): correct --url" in log
    assert read_lines(tmp_path / "out" / "errors.jsonl") == []


async def test_a_job_that_reaches_nothing_ends_and_another_start_may_help(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 2)
    code, log = await run_job(tmp_path, "http://127.0.0.1:9/a/b", "--service-timeout-seconds", "1")
    assert code == 1, log
    assert "there is no service at http://127.0.0.1:9/a/b, after 1 s (no connection: " in log
    async with Service(answering()).serving() as service:
        assert (await run_job(tmp_path, service.url))[0] == 0
    assert sorted(line["custom_id"] for line in read_lines(tmp_path / "out" / "output.jsonl")) == sorted(ids)


async def test_a_service_that_was_there_once_is_waited_for(tmp_path: Path) -> None:
    """It is deleted for longer than a service may be missing at the beginning."""
    write_input(tmp_path / "in.jsonl", 4)
    counter = itertools.count()

    async def handle(body: Json) -> web.Response:
        return refuse(404, "service_not_found") if 0 < next(counter) < 12 else answer_prompt(body)

    async with Service(handle).serving() as service:
        flags = ("--service-timeout-seconds", "1", "--max-concurrency", "1")
        code, log = await run_job(tmp_path, service.url, *flags, "--completion-window-seconds", "4")
    assert code == 3, log


async def test_a_code_of_a_service_that_is_no_code_is_cut(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 1)

    async def handle(_: Json) -> web.Response:
        return web.json_response({"error": {"code": "x" * 1_000_000}}, status=401)

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url, "--max-attempts", "1")
    assert (code, len(log) < 10_000) == (1, True)


@pytest.mark.slow
async def test_the_log_names_an_engine_that_does_not_answer_and_then_why_requests_wait(tmp_path: Path) -> None:
    """The gateway holds requests while a service starts from zero. Later no request is in flight during a pause."""
    write_input(tmp_path / "in.jsonl", 1)

    async def handle(_: Json) -> web.Response:
        await asyncio.sleep(11)
        return refuse(503, "start_failed", Retry_After="20")

    async with Service(handle).serving() as service:
        job = await start_job(tmp_path, service.url, "--grace-seconds", "0", "--completion-window-seconds", "32")
        code, log = await wait_job(job)
    assert code == 3, log
    held_by = [line.split("held_by=")[1].split()[0] for line in log.splitlines() if "held_by=" in line]
    assert held_by == ["waiting_for_responses", "start_failed", "start_failed"]
