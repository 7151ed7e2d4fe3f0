"""Tests receipts of generated texts on a real server, whole and in streams. Other tasks' tests have theirs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.processes import EngineServer
from tests.engine.receipts import ASKED, check_receipt, check_sum

from conveyor_protocol.request_headers import USAGE_HEADER, USAGE_MARK, write_receipt_request

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True, "temperature": 0},
    "/v1/responses": {"input": "hello", "max_output_tokens": 6},
    "/v1/messages": CHAT | {"model": "served"},
}


def send(server: EngineServer, path: str, **fields: Any) -> httpx.Response:
    body = BODIES[path] | {"model": server.get("/v1/models").json()["data"][0]["id"]} | fields
    answer = server.post(path, body, **ASKED)
    assert answer.status_code == 200, answer.text
    return answer


def list_usages(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return each `usage` of a stream's events, in their order."""
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    found = [each.get("usage") or (each.get("response") or each.get("message") or {}).get("usage") for each in events]
    return [usage for usage in found if usage]


@pytest.mark.parametrize("path", BODIES)
def test_the_usage_of_a_whole_answer_has_the_receipt(server: EngineServer, path: str) -> None:
    receipt = check_receipt(send(server, path).json()["usage"]["receipt"])
    assert receipt["closed_by"] is None
    assert receipt["decode_ms"] > 0


@pytest.mark.parametrize("path", BODIES)
def test_the_last_usage_of_a_stream_has_the_receipt(server: EngineServer, path: str) -> None:
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    usages = list_usages(send(server, path, stream=True, **options))
    check_receipt(usages[-1]["receipt"])
    assert not any("receipt" in usage for usage in usages[:-1])


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", ["false", "yes", ""])
def test_without_the_header_there_is_no_receipt(server: EngineServer, path: str, value: str) -> None:
    body = BODIES[path] | {"model": server.get("/v1/models").json()["data"][0]["id"]}
    for answer in (server.post(path, body), server.post(path, body, **{"X-Receipt": value})):
        assert answer.status_code == 200
        assert "receipt" not in answer.text
        assert "x-receipt" not in answer.headers


def test_the_page_s_receipt_has_the_fields_of_an_answer(server: EngineServer) -> None:
    page = (Path(__file__).parents[4] / "docs/receipts.md").read_text()
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    asked = {"X-Receipt": write_receipt_request("gateway-1", 0.1)}
    body = BODIES["/v1/completions"] | {"cache_salt": "page"}
    receipt = server.post("/v1/completions", body, **asked).json()["usage"]["receipt"]
    assert list(receipt) == list(shown)
    assert all(f"| `{name}`" in page or f"`, `{name}` |" in page for name in receipt), "each is explained"


def test_a_gateway_adds_its_name_and_its_queue(server: EngineServer) -> None:
    header = write_receipt_request("gateway-7d4f", 0.0123)
    usage = server.post("/v1/completions", BODIES["/v1/completions"], **{"X-Receipt": header}).json()["usage"]
    assert (usage["receipt"]["gateway"], usage["receipt"]["gateway_queue_ms"]) == ("gateway-7d4f", 12.3)


def test_cached_tokens_are_shown_with_a_salt_only(server: EngineServer) -> None:
    prompt = list(range(200, 240))
    for cached in (0, 32):
        usage = send(server, "/v1/completions", prompt=prompt, cache_salt="mine").json()["usage"]
        assert usage["receipt"]["cached_tokens"] >= cached
    assert usage["receipt"]["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_has_its_receipt_too(server: EngineServer, stream: bool) -> None:
    whole = send(server, "/v1/completions", max_tokens=30).json()["choices"][0]["text"]
    fields = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
    answer = send(server, "/v1/completions", max_tokens=30, stop=whole[3:6], **fields)
    usage = list_usages(answer)[-1] if stream else answer.json()["usage"]
    assert usage["completion_tokens"] < 30
    check_receipt(usage["receipt"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_report_has_the_receipt_or_says_that_it_follows(server: EngineServer, stream: bool) -> None:
    whole = send(server, "/v1/completions", max_tokens=30).json()["choices"][0]["text"]
    for number, stop in enumerate([None, whole[3:6]]):
        key = f"receipt-{stream}-{number}"
        body = BODIES["/v1/completions"] | {"max_tokens": 30, "stop": stop, "stream": stream}
        answer = server.post("/v1/completions", body, **{USAGE_HEADER: key})
        report = json.loads(answer.content.partition(USAGE_MARK)[2] if stream else answer.headers[USAGE_HEADER])
        assert len(json.dumps(report)) <= 256
        if report.get("is_final", True):
            assert report["receipt"][0] > 0
        else:
            assert stop is not None, "the engine process itself ends any other answer"
        final = server.get(f"/usage?key={key}").json()
        assert "is_final" not in final
        assert final["receipt"][0] > 0


def test_of_an_answer_whose_client_has_left_the_steps_until_then_are_known(server: EngineServer) -> None:
    body = json.dumps(BODIES["/v1/completions"] | {"max_tokens": 200, "stream": True}).encode()
    with server.client.stream(
        "POST", server.url + "/v1/completions", content=body, headers={USAGE_HEADER: "gone"}
    ) as answer:
        next(answer.iter_lines())
    assert server.get("/usage?key=gone").json()["receipt"][0] > 0


def test_the_receipts_of_all_requests_are_the_time_of_all_steps(server: EngineServer) -> None:
    """The engine time of many requests is the busy time within 1 %: together, aborted, with choices, in streams."""

    def run(number: int, headers: Mapping[str, str]) -> None:
        fields = ({}, {"n": 2}, {"stream": True}, {"stop": "e"})[number % 4]
        body = BODIES["/v1/completions"] | {"prompt": list(range(5, 30 + number)), "max_tokens": 40} | fields
        with httpx.Client(timeout=60) as client:
            while client.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 429:
                pass

    check_sum(server, 12, run)
