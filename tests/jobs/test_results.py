"""Tests the files with the results: their format, and what a job that is started again finds in them."""

import contextlib
import json
import resource
import signal
from pathlib import Path

import pytest
from tests.jobs.running import read_lines

from conveyor_jobs.request import BatchRequest
from conveyor_jobs.results import FolderHeld, Results, ResultsError, hold_lock, read_state
from conveyor_jobs.sending import Response

REQUEST = BatchRequest("mine", "/v1/completions", b"{}")
GOOD = Response(200, "id-1", b'{\n "usage": {"prompt_tokens": 2, "completion_tokens": 3},\n "x": 5.0, "y": 1e400}')


def test_a_line_has_the_format_of_the_batch_api(tmp_path: Path) -> None:
    with Results(tmp_path, 3) as results:
        results.add(0, REQUEST, GOOD)
        results.add(1, REQUEST, Response(400, "id-2", b'{"error": {"code": "bad"}}'))
        results.add(2, REQUEST, Response(0, error="ServerDisconnectedError: gone"))
    raw = (tmp_path / "output.jsonl").read_text()
    assert raw.count("\n") == 1
    assert '"body":{"usage":{"prompt_tokens":2,"completion_tokens":3},"x":5.0,"y":1e400}' in raw
    good = json.loads(raw)
    assert good.keys() == {"id", "custom_id", "response", "error"}
    assert (good["id"], good["custom_id"], good["error"]) == ("batch_req_0", "mine", None)
    assert (good["response"]["status_code"], good["response"]["request_id"]) == (200, "id-1")
    bad, none = read_lines(tmp_path / "errors.jsonl")
    assert bad["response"] == {"status_code": 400, "request_id": "id-2", "body": {"error": {"code": "bad"}}}
    error = {"code": "no_response", "message": "ServerDisconnectedError: gone"}
    assert (none["response"], none["error"]) == (None, error)


@pytest.mark.parametrize(("body", "kept"), [(b"a\nb", "a\nb"), (b"\xff{}", "\ufffd{}"), (b"", ""), (b'{"a"', '{"a"')])
def test_a_body_that_is_no_json_is_an_error_and_kept_as_text(tmp_path: Path, body: bytes, kept: str) -> None:
    with Results(tmp_path, 1) as results:
        results.add(0, REQUEST, Response(200, "\udcff", body))
    response = read_lines(tmp_path / "errors.jsonl")[0]["response"]
    assert response == {"status_code": 200, "request_id": "?", "body": kept}


def test_tokens_are_counted_as_far_as_they_are_reported(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": 3}}
    with Results(tmp_path, 2) as results:
        results.add(0, REQUEST, Response(200, "", json.dumps({"usage": usage}).encode()))
        results.add(1, REQUEST, Response(200, "", b'{"usage": {"input_tokens": 2, "output_tokens": 7}}'))
    counts = results.counts
    assert (counts.input_tokens, counts.cached_tokens, counts.output_tokens) == (7, 3, 7)


@pytest.mark.parametrize("number", ["-5", "9" * 4000, "1e400", '"7"'])
def test_a_number_of_tokens_that_cannot_be_one_is_not_counted(tmp_path: Path, number: str) -> None:
    with Results(tmp_path, 1) as results:
        results.add(
            0, REQUEST, Response(200, "", b'{"usage": {"prompt_tokens": 1, "output_tokens": %b}}' % number.encode())
        )
    assert (results.counts.completed, results.counts.input_tokens, results.counts.output_tokens) == (1, 0, 0)


@pytest.mark.parametrize("status", [200, 400])
def test_of_a_large_body_that_is_no_json_the_beginning_is_kept(tmp_path: Path, status: int) -> None:
    with Results(tmp_path, 1) as results:
        results.add(0, REQUEST, Response(status, "", bytes(31 << 20)))
    assert (tmp_path / "errors.jsonl").stat().st_size < 1 << 20
    (error,) = read_lines(tmp_path / "errors.jsonl")
    assert error["response"]["body"].endswith("\0... (32505856 bytes in all)")
    with Results(tmp_path, 1) as results:
        assert results.is_done(0)


def test_what_is_done_is_found_again_and_a_torn_line_is_not(tmp_path: Path) -> None:
    with Results(tmp_path, 4) as results:
        results.add(2, REQUEST, GOOD)
        results.add(0, REQUEST, Response(500))
        results.add_expired(3, REQUEST)
    output = tmp_path / "output.jsonl"
    whole = output.read_bytes()
    output.write_bytes(whole + whole[:-1])
    with Results(tmp_path, 4) as results:
        assert [results.is_done(number) for number in range(4)] == [True, False, True, True]
        counts = results.counts
        assert (counts.completed, counts.failed, counts.input_tokens, counts.output_tokens) == (1, 2, 2, 3)
        assert counts.expired == 1
        results.add(1, REQUEST, GOOD)
    assert [line["id"] for line in read_lines(output)] == ["batch_req_2", "batch_req_1"]


def test_after_a_half_written_line_nothing_more_is_written_so_that_the_next_start_can_go_on(tmp_path: Path) -> None:
    large = Response(200, "id-1", json.dumps({"text": "x" * 100_000}).encode())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with contextlib.suppress(OSError), Results(tmp_path, 4) as results:
            results.add(0, REQUEST, GOOD)
            results.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
            with pytest.raises(OSError, match="File too large"):
                results.add(1, REQUEST, large)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            for write in (lambda: results.add(2, REQUEST, GOOD), results.flush):
                with pytest.raises(OSError, match="File too large"):
                    write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    with Results(tmp_path, 4) as results:
        assert [results.is_done(number) for number in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("line", ["{}", '{"id": "batch_req_9"}', '{"id": "batch_req_-1"}', "no", '{"id": "x"}'])
def test_a_folder_with_other_lines_is_refused_and_stays_as_it_is(tmp_path: Path, line: str) -> None:
    (tmp_path / "output.jsonl").write_text(f"{line}\n")
    with pytest.raises(ResultsError, match=r"output.jsonl has a line at byte 0 that is no result of this job"):
        Results(tmp_path, 1).__enter__()
    assert (tmp_path / "output.jsonl").read_text() == f"{line}\n"


def test_a_line_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    with Results(tmp_path, 2) as results:
        results.add(1, REQUEST, GOOD)
    output = tmp_path / "output.jsonl"
    output.write_bytes(2 * output.read_bytes())
    with pytest.raises(ResultsError, match="that is no result of this job, or occurs twice"):
        Results(tmp_path, 2).__enter__()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"status": "completed", "created_at": "x", "input_sha256": "y"}'])
def test_a_state_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "batch.json").write_text(text)
    with pytest.raises(ResultsError, match=r"batch.json is not the state of a job"):
        read_state(tmp_path)


def test_one_process_writes_to_a_folder(tmp_path: Path) -> None:
    with hold_lock(tmp_path), pytest.raises(FolderHeld, match="another process writes to"):
        hold_lock(tmp_path)
    hold_lock(tmp_path).close()
