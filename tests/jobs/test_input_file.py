"""Tests that mistakes in the input are told before anything is sent, and that an input with an address is fetched."""

import json
from pathlib import Path

import pytest
from aiohttp import web
from tests.jobs.running import Service, answer_prompt, answering, make_line, read_lines, run_job, write_input

from conveyor_jobs.input_file import MAX_LINE_BYTES, InvalidInput, open_input


def errors_of(path: Path) -> dict[int, str]:
    with pytest.raises(InvalidInput) as raised:
        open_input(str(path), path.parent)
    return {mistake.line: mistake.message for mistake in raised.value.mistakes}


def test_blank_lines_and_a_missing_last_line_break_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"\n{json.dumps(make_line('a'))}\r\n  \n{json.dumps(make_line('b', '/v1/embeddings'))}")
    opened = open_input(str(path), tmp_path)
    assert [(number, request.custom_id) for number, request in opened.read()] == [(0, "a"), (1, "b")]
    assert (opened.num_requests, opened.paths) == (2, {"/v1/completions", "/v1/embeddings"})


def test_every_mistake_is_reported_with_its_line_up_to_twenty(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{json.dumps(make_line('same'))}\n" for _ in range(3)) + "{\n")
    assert errors_of(path) == {
        2: "custom_id 'same' occurs twice",
        3: "custom_id 'same' occurs twice",
        4: "it is not a request in JSON: Input data was truncated",
    }
    path.write_text("no\n" * 30)
    assert len(errors_of(path)) == 20


def test_an_input_without_requests_is_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n")
    assert errors_of(path) == {0: "the file has no requests"}


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.truncate(MAX_LINE_BYTES + 10)
    assert errors_of(path) == {1: "it is longer than 32 MiB"}


async def test_a_job_with_a_mistake_sends_nothing_and_ends_with_code_2(tmp_path: Path) -> None:
    write_input(tmp_path / "in.jsonl", 3)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"custom_id": "x", "url": "/v1/fly", "body": {}}\n')

    async def handle(body: object) -> web.Response:
        raise AssertionError

    async with Service(handle).serving() as service:
        code, log = await run_job(tmp_path, service.url)
    assert (code, service.requests) == (2, {})
    assert 'event=invalid_input line=4 message="url must be one of /v1/completions, ' in log


async def test_an_input_with_an_address_is_fetched_once_and_its_query_is_not_logged(tmp_path: Path) -> None:
    ids = write_input(tmp_path / "there.jsonl", 5)

    async with Service(answering()).serving() as service:
        service.files["/in.jsonl"] = (tmp_path / "there.jsonl").read_bytes()
        for _ in range(2):
            code, log = await run_job(tmp_path, service.url, given=f"{service.url}/in.jsonl?Signature=secret")
            assert code == 0, log
            assert "secret" not in log
    assert service.requests["/in.jsonl"] == 1
    assert sorted(line["custom_id"] for line in read_lines(tmp_path / "out" / "output.jsonl")) == ids


async def test_an_input_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    code, log = await run_job(tmp_path, "http://127.0.0.1:9/a/b", given=str(tmp_path / "none.jsonl"))
    assert (code, f"there is no file {tmp_path / 'none.jsonl'}" in log) == (2, True)
    code, log = await run_job(tmp_path, "http://127.0.0.1:9/a/b", given="http://127.0.0.1:9/x?Signature=secret")
    assert (code, "http://127.0.0.1:9/x cannot be fetched: " in log, "secret" in log) == (1, True, False)


@pytest.mark.parametrize("given", ["s3://bucket/in.jsonl", "/dev/stdin", "/", "http://me:hunter2@127.0.0.1:9/x"])
async def test_an_input_of_another_kind_is_refused(tmp_path: Path, given: str) -> None:
    code, log = await run_job(tmp_path, "http://127.0.0.1:9/a/b", given=given)
    assert (code, log.count("\n"), "hunter2" in log) == (2, 1, False), log


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/x?sig=hunter2 y", "http://[::1/x?sig=hunter2", "http://a:b/x"])
async def test_an_invalid_address_is_reported_without_possible_secrets(tmp_path: Path, address: str) -> None:
    code, log = await run_job(tmp_path, "http://127.0.0.1:9/a/b", given=address)
    assert code in (1, 2)
    assert (log.count("\n"), "sig" in log, "Traceback" in log) == (1, False, False), log


async def test_another_address_needs_another_folder_and_a_wrong_file_is_fetched_again(tmp_path: Path) -> None:
    write_input(tmp_path / "there.jsonl", 2)

    async with Service(answering()).serving() as service:
        service.files |= {"/monday": b"<html>", "/tuesday": (tmp_path / "there.jsonl").read_bytes()}
        code, log = await run_job(tmp_path, service.url, given=f"{service.url}/monday")
        assert (code, "event=invalid_input line=1" in log) == (2, True), log
        service.files["/monday"] = service.files["/tuesday"]
        assert (await run_job(tmp_path, service.url, given=f"{service.url}/monday?sig=a"))[0] == 0
        assert (await run_job(tmp_path, service.url, given=f"{service.url}/monday?sig=b"))[0] == 0
        code, log = await run_job(tmp_path, service.url, given=f"{service.url}/tuesday")
    assert (code, "has the results of another input" in log) == (2, True), log


@pytest.mark.parametrize("num_requests", [2001, 0])
async def test_an_input_that_changes_while_the_job_runs_ends_it(tmp_path: Path, num_requests: int) -> None:
    write_input(tmp_path / "in.jsonl", 2000)

    async def handle(body: dict[str, object]) -> web.Response:
        if sum(service.requests.values()) == 5:
            write_input(tmp_path / "in.jsonl", num_requests)
        return answer_prompt(body)

    service = Service(handle)
    async with service.serving():
        code, log = await run_job(tmp_path, service.url)
    assert (code, "the input has changed while the job ran" in log) == (2, True), log
    assert sum(service.requests.values()) < 200
