"""Tests whole jobs: each request has one result, whatever happens to the job or to the service."""

import asyncio
import itertools
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai.types import Batch
from tests.jobs.running import (
    Service,
    answer_prompt,
    answering,
    make_line,
    read_lines,
    refuse,
    run_job,
    start_job,
    wait_job,
    write_input,
)

from conveyor_jobs.dispatcher import MAX_BODIES_BYTES
from conveyor_jobs.sending import MAX_ANSWER_BYTES

Json = dict[str, Any]


def read_ids(folder: Path, name: str) -> list[str]:
    return sorted(line["custom_id"] for line in read_lines(folder / "out" / f"{name}.jsonl"))


def read_state(folder: Path) -> Json:
    state: Json = json.loads((folder / "out" / "batch.json").read_text())
    return state


async def test_every_request_has_one_result(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 300)

    async def handle(body: Json) -> web.Response:
        await asyncio.sleep(0.01)
        return refuse(400, "bad") if body["prompt"].endswith("7") else answer_prompt(body)

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, f"{service.url}/v1/", "--max-concurrency", "20")
    assert code == 0, log
    assert service.most == 20
    failed = [each for each in ids if each.endswith("7")]
    assert read_ids(tmp_path, "errors") == sorted(failed)
    assert read_ids(tmp_path, "output") == sorted(set(ids) - set(failed))
    for line in read_lines(tmp_path / "out" / "output.jsonl"):
        assert line["response"]["body"]["choices"][0]["text"] == line["custom_id"]
    batch = Batch.model_validate(read_state(tmp_path), strict=True)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 300, "completed": 270, "failed": 30}
    assert "outcome=completed requests=300 completed=270 failed=30 input_tokens=540 output_tokens=810" in log


async def test_a_killed_job_continues_where_it_was(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 400)

    async with Service(answering(0.02)).serving() as service:
        for threshold in (80, 200):
            job = await start_job(tmp_path, service.url, "--max-concurrency", "8")
            await service.wait_requests(threshold)
            job.kill()
            await wait_job(job)
        code, log = await run_job(tmp_path, service.url, "--max-concurrency", "8")
    assert code == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)
    num_kept = int(log.split("event=started requests=400 done=")[1].split()[0])
    assert num_kept > 0


async def test_sigterm_lets_requests_end_and_another_start_continues(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 100)

    async with Service(answering(0.2)).serving() as service:
        job = await start_job(tmp_path, service.url, "--max-concurrency", "4")
        await service.wait_requests(4)
        job.send_signal(signal.SIGTERM)
        code, log = await wait_job(job)
        assert code == 143, log
        done = read_ids(tmp_path, "output")
        assert len(done) == sum(service.requests.values()) >= 4
        assert read_state(tmp_path)["status"] == "in_progress"
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)
    assert set(service.requests.values()) == {1}, "a request was sent twice"


async def test_a_full_queue_halves_what_is_sent_and_fails_nothing(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 120)
    refused = 0

    async def handle(body: Json) -> web.Response:
        nonlocal refused
        if service.running > 8:
            refused += 1
            return refuse(429, "queue_full", Retry_After="1")
        await asyncio.sleep(0.05)
        return answer_prompt(body)

    service = Service(handle)
    async with service.serving():
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)
    assert 0 < refused < 60
    assert service.most < 40


@pytest.mark.parametrize(
    ("status", "code", "times"),
    [(503, "start_failed", 8), (404, "service_not_found", 8), (504, "queue_timeout", 8), (500, "internal_error", 2)],
)
async def test_what_will_pass_is_waited_for(tmp_path: Path, status: int, code: str, times: int) -> None:
    ids = write_input(tmp_path / "in.jsonl", 4)
    counter = itertools.count()

    async def handle(body: Json) -> web.Response:
        return refuse(status, code, Retry_After="1") if next(counter) < times else answer_prompt(body)

    async with Service(handle).serving() as service:
        ended, log = await run_job(tmp_path, service.url)
    assert ended == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)


async def test_a_request_that_breaks_its_engine_is_tried_three_times(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 6)

    async def handle(body: Json) -> web.Response:
        return refuse(502, "engine_lost", Retry_After="1") if body["prompt"] == ids[2] else answer_prompt(body)

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    assert service.requests[ids[2]] == 3
    assert read_ids(tmp_path, "errors") == [ids[2]]
    assert read_lines(tmp_path / "out" / "errors.jsonl")[0]["response"]["status_code"] == 502


async def test_a_response_without_end_is_an_error_and_not_retried(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 3)

    async def handle(body: Json) -> web.Response:
        return answer_prompt(body) if body["prompt"] != ids[1] else web.Response(body=bytes(MAX_ANSWER_BYTES + 1))

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    (error,) = read_lines(tmp_path / "out" / "errors.jsonl")
    assert (error["custom_id"], error["error"]["code"], service.requests[ids[1]]) == (ids[1], "no_response", 1)


async def test_an_errors_file_that_is_removed_is_tried_again(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 6)
    is_fixed = False

    async def handle(body: Json) -> web.Response:
        return answer_prompt(body) if is_fixed or body["prompt"] != ids[2] else refuse(400, "bad")

    async with Service(handle).serving() as service:
        await run_job(tmp_path, service.url)
        is_fixed = True
        (tmp_path / "out" / "errors.jsonl").unlink()
        code, log = await run_job(tmp_path, service.url)
        assert code == 0, log
        assert read_ids(tmp_path, "output") == sorted(ids)
        assert sum(service.requests.values()) == 7
        code, log = await run_job(tmp_path, service.url)
    assert (code, sum(service.requests.values())) == (0, 7)
    assert "event=ended outcome=completed requests=6 completed=6 failed=0" in log


async def test_an_outage_before_the_service_costs_no_request(tmp_path: Path) -> None:
    """A proxy answers 502 without a code, and breaks connections, for longer than the attempts of a request take."""
    ids = write_input(tmp_path / "in.jsonl", 60)
    began = 0.0

    async def handle(body: Json) -> web.Response:
        nonlocal began
        if sum(service.requests.values()) > 20:
            began = began or time.monotonic()
            if time.monotonic() - began < 6:
                if body["prompt"].endswith("1"):
                    raise ConnectionResetError
                return web.Response(status=502, text="<html>Bad Gateway")
        return answer_prompt(body)

    service = Service(handle)
    async with service.serving():
        code, log = await run_job(tmp_path, service.url, "--max-attempts", "2")
    assert code == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)


async def test_one_request_that_is_forbidden_is_an_error_of_its_own(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 60)

    async def handle(body: Json) -> web.Response:
        return refuse(403, "blocked") if body["prompt"] == ids[40] else answer_prompt(body)

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    assert read_ids(tmp_path, "errors") == [ids[40]]


async def test_a_job_that_waits_ends_at_once_on_sigterm(tmp_path: Path) -> None:
    """Nothing listens. The grace is for requests in flight, and there are none."""
    write_input(tmp_path / "in.jsonl", 6)
    job = await start_job(tmp_path, "http://127.0.0.1:9/a/b", "--grace-seconds", "60")
    while not (tmp_path / "out" / "batch.json").exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        code, _ = await wait_job(job)
    assert code == 143


async def test_large_requests_are_not_all_in_flight_at_a_time(tmp_path: Path) -> None:
    lines = [json.dumps(make_line(str(number), prompt="x" * (9 << 20))) + "\n" for number in range(20)]
    (tmp_path / "in.jsonl").write_text("".join(lines))

    async def handle(body: Json) -> web.Response:
        await asyncio.sleep(0.1)
        return answer_prompt(body | {"prompt": ""})

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    assert 1 < service.most <= MAX_BODIES_BYTES // (9 << 20)


async def test_a_longer_window_counts_when_the_job_is_started_again(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 20)

    async with Service(answering(0.2)).serving() as service:
        job = await start_job(tmp_path, service.url, "--completion-window-seconds", "2", "--max-concurrency", "1")
        await service.wait_requests(1)
        job.send_signal(signal.SIGTERM)
        assert (await wait_job(job))[0] == 143
        await asyncio.sleep(2)
        code, log = await run_job(tmp_path, service.url, "--completion-window-seconds", "60")
    assert code == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)


async def test_a_job_that_was_killed_while_requests_expired_has_expired(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 10)
    flags = ("--completion-window-seconds", "1")
    assert (await run_job(tmp_path, "http://127.0.0.1:9/a/b", *flags))[0] == 3
    state = read_state(tmp_path) | {"status": "in_progress"}
    (tmp_path / "out" / "batch.json").write_text(json.dumps(state))
    code, log = await run_job(tmp_path, "http://127.0.0.1:9/a/b", *flags)
    assert (code, "outcome=expired requests=10 completed=0 failed=10" in log) == (3, True), log


async def test_what_has_no_response_when_the_window_ends_expires(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 30)

    async def handle(body: Json) -> web.Response:
        if int(body["prompt"].removeprefix("request-")) < 10:
            return answer_prompt(body)
        await asyncio.sleep(60)
        raise AssertionError

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url, "--completion-window-seconds", "2")
    assert code == 3, log
    assert read_ids(tmp_path, "output") == sorted(ids[:10])
    expired = read_lines(tmp_path / "out" / "errors.jsonl")
    assert sorted(line["custom_id"] for line in expired) == sorted(ids[10:])
    assert {line["error"]["code"] for line in expired} == {"batch_expired"}
    batch = Batch.model_validate(read_state(tmp_path), strict=True)
    assert (batch.status, batch.request_counts and batch.request_counts.failed) == ("expired", 20)


@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [(401, "no_key", 1), (403, "forbidden", 1), (400, "unknown_class", 2), (308, "moved", 2)],
)
async def test_what_every_request_would_get_ends_the_job_and_is_no_result(
    tmp_path: Path, status: int, code: str, exit_code: int
) -> None:
    write_input(tmp_path / "in.jsonl", 1000)

    async def handle(body: Json) -> web.Response:
        return refuse(status, code)

    async with Service(handle).serving() as service:
        ended, log = await run_job(tmp_path, service.url)
    assert ended == exit_code, log
    assert f"/v1/completions got {status}" in log
    assert sum(service.requests.values()) < 20
    assert read_lines(tmp_path / "out" / "errors.jsonl") == []


async def test_class_and_key_are_sent(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    (tmp_path / "key").write_text("very-secret\n")

    flags = ("--request-class", "batch", "--api-key-file", str(tmp_path / "key"), "--log-level", "DEBUG")
    async with Service(answering()).serving() as service:
        code, log = await run_job(tmp_path, service.url, *flags)
    assert code == 0, log
    assert service.headers[0]["X-Request-Class"] == "batch"
    assert service.headers[0]["Authorization"] == "Bearer very-secret"
    assert "very-secret" not in log


async def test_a_key_that_is_replaced_while_the_job_runs_is_sent(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 2)
    key, gate = tmp_path / "key", asyncio.Event()
    key.write_text("first")

    async def handle(body: Json) -> web.Response:
        if not gate.is_set():
            key.write_text("second")
            await asyncio.sleep(2.5)
            gate.set()
        return answer_prompt(body)

    flags = ("--api-key-file", str(key), "--max-concurrency", "1")
    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url, *flags)
    assert code == 0, log
    assert [headers["Authorization"] for headers in service.headers] == ["Bearer first", "Bearer second"]


async def test_another_input_does_not_mix_with_the_results(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 3)

    async with Service(answering()).serving() as service:
        await run_job(tmp_path, service.url)
        write_input(tmp_path / "in.jsonl", 4)
        code, log = await run_job(tmp_path, service.url)
    assert code == 2
    assert "has the results of another input, or the input has changed: use another folder" in log
    assert sum(service.requests.values()) == 3


async def test_a_second_job_in_the_folder_is_refused(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    gate = asyncio.Event()

    async def handle(body: Json) -> web.Response:
        await gate.wait()
        return answer_prompt(body)

    async with Service(handle).serving() as service:
        first = await start_job(tmp_path, service.url)
        await service.wait_requests(1)
        code, log = await run_job(tmp_path, service.url)
        assert (code, "another process writes to" in log) == (1, True)
        gate.set()
        assert (await wait_job(first))[0] == 0


async def test_a_full_disk_ends_the_job_and_loses_no_request(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "in.jsonl", 200)

    async with Service(answering()).serving() as service:
        code, log = await run_job(tmp_path, service.url, max_file_bytes=10_000)
        assert (code, "File too large" in log) == (1, True), log
        assert 0 < sum(service.requests.values()) < 200
        code, log = await run_job(tmp_path, service.url)
    assert code == 0, log
    assert read_ids(tmp_path, "output") == sorted(ids)


@pytest.mark.parametrize(
    "url", ["qwen", "ftp://x", "http://me:x@h/", "http://h/?a=b", "http://h:99999/x", "http://h:p", "http://[::1"]
)
async def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    code, log = await run_job(tmp_path, url)
    assert code == 2
    assert "flag --url: `url` must be an address http[s]://HOST[:PORT][/PATH] without user, password and query" in log
