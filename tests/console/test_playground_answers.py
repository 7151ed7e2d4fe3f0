"""Tests how answers become what the page for trying a service shows, and commands what a shell runs."""

import json
import shlex
import tracemalloc
from typing import Any

import pytest

from conveyor_console.playground.answers import MAX_ROWS, describe_error, read_answer, read_event, show_receipt
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
        ("pictures", '{"data": [{"b64_json": "é"}]}'.encode()),
        ("tensors", {"outputs": 5}),
        ("tensors", b'{"outputs": [' + b"9" * 5_000 + b"]}"),
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
        (b'{"error": 5}', 'Status 429: {"error": 5} Try again in 3 s.'),
        (b"<h1>Bad</h1>", "Status 429: <h1>Bad</h1> Try again in 3 s."),
        (b"", "Status 429: The answer is empty. Try again in 3 s."),
    ],
)
def test_an_error_is_told_in_the_words_of_its_api(body: bytes, words: str) -> None:
    assert describe_error(429, body, "3") == words


def test_a_receipt_is_in_the_usage_or_in_the_header() -> None:
    event = read_event(
        b'{"choices": [], "usage": {"prompt_tokens": 1, "receipt": {"engine_ms": 1.5, "closed_by": null}}}'
    )
    assert json.loads(show_receipt(event.receipt, "")) == {"engine_ms": 1.5, "closed_by": None}
    assert json.loads(show_receipt(b"", '{"engine_ms": 2}')) == {"engine_ms": 2}
    assert show_receipt(b"", "") == show_receipt(b"", "{") == show_receipt(b"", "\udcff") == ""


@pytest.mark.parametrize(
    "receipt",
    [
        b"[" * 800 + b"0," * 9_000 + b"0" + b"]" * 800,  # with indents, 14 MiB
        b'{"engine_ms": ' + b"[" * 800 + b"0" + b"]" * 800 + b"}",
        b'{"engine": "' + b"x" * 20_000 + b'"}',
        b"[" * 9_000 + b"]" * 9_000,
        b'{"engine_ms": ' + b"9" * 5_000 + b"}",
        b'{"engine_ms": 1e999}',
    ],
)
def test_a_receipt_that_is_long_or_no_flat_object_is_left_out(receipt: bytes) -> None:
    assert show_receipt(read_event(b'{"usage": {"receipt": ' + receipt + b"}}").receipt, "") == ""


def test_long_outputs_are_cut_before_they_are_parsed() -> None:
    body = b'{"outputs": [' + b"[]," * 300_000 + b"[]]}"
    tracemalloc.start()
    text = read("tensors", body).text
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text.startswith("[[],[]")
    assert len(text) == 20_000
    assert peak < 4 * len(body)
    assert read("tensors", {"outputs": [{"data": [1]}, {"data": [2]}]}).text == '{"data": [1]}\n{"data": [2]}'


def test_a_command_that_no_shell_could_run_is_left_out() -> None:
    request = ApiRequest("/v1/completions", "events", {"prompt": "'" * 100_000})
    assert write_curl("https://x", request, has_key=True) == "# The request is too long to be shown as a command."


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
