"""Tests how answers become what the page for trying a service shows, and commands what a shell runs."""

import json
import shlex
from typing import Any

import pytest

from conveyor_console.playground.answers import MAX_ROWS, describe_error, find_receipt, read_answer
from conveyor_console.playground.api_requests import ApiRequest, Reading, write_curl
from conveyor_console.playground.fields import Upload

TEXTS = ["one", "two"]


def read(reading: Reading, body: Any) -> Any:
    request = ApiRequest("/x", reading, inputs=TEXTS)
    return read_answer(request, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_vectors_are_compared_with_the_first() -> None:
    data = [{"index": 0, "embedding": [3, 4, 0, 0, 0]}, {"index": 1, "embedding": [4, -3, 0, 0, 0]}]
    table = read("embeddings", {"data": data}).table
    assert table.rows == [("one", "1", "5", "3, 4, 0, 0, …"), ("two", "0", "5", "4, -3, 0, 0, …")]
    zero = read("embeddings", {"data": [{"index": 1, "embedding": [0.0]}]}).table
    assert zero.rows == [("two", "0", "1", "0")]


def test_entities_take_the_place_of_a_label() -> None:
    entity = {"entity": "B-PER", "score": 0.99, "index": 1, "word": "Ada", "start": 0, "end": 3}
    rows = read("labels", {"data": [{"index": 0, "entities": [entity]}, {"index": 1, "entities": []}]}).table.rows
    assert [row[1] for row in rows] == ["Ada (B-PER)", "–"]


@pytest.mark.parametrize(
    ("reading", "body"),
    [
        ("embeddings", {"data": [{"index": 7, "embedding": [1]}]}),
        ("embeddings", {"data": [{"index": 0, "embedding": [1e999]}, {"index": 1, "embedding": ["x"]}]}),
        ("ranking", b"[" * 10_000),
        ("labels", b"\xff\xfe"),
        ("image labels", {"data": []}),
        ("pictures", {"data": [{"b64_json": "PHN2Zz4="}]}),
        ("pictures", {"data": [{"b64_json": '" onerror="alert(1)'}]}),
        ("tensors", {"error": "no"}),
        ("tensors", {"outputs": 5}),
    ],
)
def test_an_answer_of_another_form_is_shown_as_text(reading: Reading, body: Any) -> None:
    answer = read(reading, body)
    assert (answer.table, answer.pictures) == (None, ())
    assert answer.text


def test_a_table_has_a_limited_number_of_rows() -> None:
    results = [{"index": 0, "relevance_score": 0.5}] * (MAX_ROWS + 1)
    assert len(read("ranking", {"results": results}).table.rows) == MAX_ROWS


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"code": "queue_full", "message": "Full."}}', "Status 429: queue_full: Full. Try again in 3 s."),
        (b'{"error": "two shapes"}', "Status 429: two shapes Try again in 3 s."),
        (b"<h1>Bad</h1>", "Status 429: <h1>Bad</h1> Try again in 3 s."),
        (b"", "Status 429: The answer is empty. Try again in 3 s."),
    ],
)
def test_an_error_is_told_in_the_words_of_its_api(body: bytes, words: str) -> None:
    assert describe_error(429, body, "3") == words


def test_a_receipt_is_in_the_usage_or_in_the_header() -> None:
    assert json.loads(find_receipt({"receipt": {"engine_ms": 1.5}}, "")) == {"engine_ms": 1.5}
    assert json.loads(find_receipt(None, '{"engine_ms": 2}')) == {"engine_ms": 2}
    assert find_receipt({}, "") == find_receipt(None, "{") == ""


def split(command: str) -> list[str]:
    """Return the words as a shell does, which joins lines."""
    return shlex.split(command.replace("\\\n", ""))


def test_a_command_quotes_everything_and_has_no_key() -> None:
    hostile = "'; rm -rf ~; echo '$(id)`id`"
    command = write_curl(
        "https://x/team/qwen", ApiRequest("/v1/completions", "events", {"prompt": hostile}), has_key=True
    )
    words = split(command)
    assert json.loads(words[words.index("-d") + 1]) == {"prompt": hostile}
    assert "Authorization: Bearer $KEY" in words
    form = ApiRequest("/x", "events", parts=[("language", hostile)], file_part="file", upload=Upload(hostile, b""))
    words = split(write_curl("https://x", form, has_key=False))
    assert words[-3:] == [f"language={hostile}", "-F", f"file=@{hostile}"]
    assert not any("Authorization" in word for word in words)
