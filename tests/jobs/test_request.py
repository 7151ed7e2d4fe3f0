"""Tests which lines are requests, and what is told of the others."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobs.running import make_line

from conveyor_jobs.request import InvalidLine, parse_line
from e2e.cluster.paths import REPOSITORY


def test_a_line_is_a_request_whose_body_stays_as_written() -> None:
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x",  "n": 5.0}}\n'
    request = parse_line(line)
    assert (request.custom_id, request.path, request.body) == ("a", "/v1/embeddings", b'{"input": "x",  "n": 5.0}')


def test_the_page_s_line_is_a_request() -> None:
    page = (REPOSITORY / "docs/jobs.md").read_text()
    request = parse_line(page.partition("```json\n")[2].partition("```")[0].encode())
    assert (request.custom_id, request.path) == ("first", "/v1/chat/completions")


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/rerank", "/classify"])
def test_every_path_that_takes_json_may_be_used(url: str) -> None:
    assert parse_line(json.dumps(make_line("a", url)).encode()).path == url


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": ""}, "custom_id must have 1 to 512 characters"),
        ({"custom_id": "x" * 513}, "custom_id must have 1 to 512 characters"),
        ({"custom_id": 7}, "Expected `str`, got `int`"),
        ({"method": "GET"}, "method must be POST, not 'GET'"),
        ({"url": "/v1/audio/transcriptions"}, "url must be one of /v1/completions, "),
        ({"url": "http://elsewhere/v1/completions"}, "url must be one of"),
        ({"body": [1]}, "Expected `object`, got `array`"),
        ({"body": {"stream": True}}, "a job does not stream: leave out `stream`"),
    ],
)
def test_another_line_is_refused_with_its_reason(change: object, message: str) -> None:
    assert isinstance(change, dict)
    with pytest.raises(InvalidLine) as raised:
        parse_line(json.dumps(make_line("a") | change).encode())
    assert message in str(raised.value)


@given(st.binary() | st.text().map(str.encode))
def test_no_bytes_are_anything_but_a_request_or_invalid(line: bytes) -> None:
    with pytest.raises(InvalidLine):
        parse_line(line)


def test_a_deeply_nested_line_is_invalid() -> None:
    with pytest.raises(InvalidLine):
        parse_line(b'{"custom_id": "a", "url": "/v1/completions", "body": {"x": ' + b"[" * 100_000)


def test_a_byte_order_mark_is_named_as_such() -> None:
    with pytest.raises(InvalidLine, match="byte order mark"):
        parse_line(b"\xef\xbb\xbf" + json.dumps(make_line("a")).encode())
