"""Tests what a gateway learns about the tokens that a request has used, on a real server."""

import json
from typing import Any

import httpx
import pytest
from tests.engine.processes import EngineServer

from conveyor_engine.serving.http.usage import ENDED_MAX, UsageReports, find_report
from conveyor_protocol.request_headers import USAGE_HEADER, USAGE_MARK

PROMPT = list(range(5, 60))
BODY = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True}


def read_used(server: EngineServer, key: str) -> dict[str, int]:
    answer = server.get(f"/usage?key={key}")
    assert answer.status_code == 200
    used: dict[str, int] = answer.json()
    return used


def send(server: EngineServer, key: str, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", BODY | fields, **{USAGE_HEADER: key})


def test_a_whole_answer_has_its_report_in_a_header(server: EngineServer) -> None:
    answer = send(server, "whole")
    used = json.loads(answer.headers[USAGE_HEADER])
    assert (used["prompt_tokens"], used["completion_tokens"]) == (len(PROMPT), 10)
    assert answer.json()["usage"]["completion_tokens"] == 10
    assert read_used(server, "whole") == used


def test_a_stream_has_its_report_behind_its_last_event(server: EngineServer) -> None:
    plain = server.post("/v1/completions", BODY | {"stream": True}).content
    assert USAGE_MARK not in plain
    answer = send(server, "stream", stream=True, stream_options={"include_usage": True})
    events, _, report = answer.content.partition(USAGE_MARK)
    assert events.endswith(b"data: [DONE]\n\n")
    usage = json.loads(events.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    assert json.loads(report)["completion_tokens"] == usage["completion_tokens"] == 10
    assert json.loads(answer.headers[USAGE_HEADER])["prompt_tokens"] == len(PROMPT), "known from the first token on"


def test_prompts_count_once_and_cached_tokens_are_reported_to_the_gateway_alone(server: EngineServer) -> None:
    send(server, "before")
    answer = send(server, "cached", prompt=[PROMPT, PROMPT], n=2)
    used = json.loads(answer.headers[USAGE_HEADER])
    assert (used["prompt_tokens"], used["completion_tokens"]) == (2 * len(PROMPT), 40)
    assert 0 < used["cached_tokens"] < 2 * len(PROMPT)
    assert answer.json()["usage"]["prompt_tokens_details"] is None


def test_what_is_refused_has_used_nothing(server: EngineServer) -> None:
    answer = send(server, "refused", max_tokens=-1)
    assert answer.status_code == 400
    assert set(json.loads(answer.headers[USAGE_HEADER]).values()) == {0}


def test_of_an_answer_whose_client_has_left_the_tokens_until_then_are_known(server: EngineServer) -> None:
    body = json.dumps(BODY | {"max_tokens": 200, "stream": True}).encode()
    with server.client.stream(
        "POST", server.url + "/v1/completions", content=body, headers={USAGE_HEADER: "left"}
    ) as answer:
        next(answer.iter_lines())
    used = read_used(server, "left")
    assert used["prompt_tokens"] == len(PROMPT)
    assert 1 <= used["completion_tokens"] <= 200
    server.wait_load(running=0, waiting=0)
    assert read_used(server, "left") == used


@pytest.mark.parametrize("key", ["", "no-such-key", "a" * 65])
def test_a_key_that_no_request_has_is_not_found(server: EngineServer, key: str) -> None:
    answer = send(server, key) if key != "no-such-key" else send(server, "another")
    assert (USAGE_HEADER in answer.headers) == (key == "no-such-key")
    assert server.get(f"/usage?key={key}").status_code == 404


def test_reports_of_ended_requests_are_bounded() -> None:
    reports = UsageReports()
    for number in range(ENDED_MAX + 2):
        scope = {"headers": [(b"x-engine-usage", str(number).encode())]}
        with reports.reporting(scope) as report:
            assert report is find_report(scope) is reports.find(str(number))
    assert reports.find("1") is None
    assert reports.find("2") is not None
