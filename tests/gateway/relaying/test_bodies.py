"""Tests bodies that the gateway reads because they arrive at the root. test_gateway tests their limits."""

import json
import tracemalloc

import pytest

from conveyor_gateway.errors import GatewayError
from conveyor_gateway.relaying.bodies import (
    MAX_ROUTED_BYTES,
    NO_FIELDS,
    read_model,
    read_queue_fields,
    rename_model,
    requests_stream,
)
from conveyor_gateway.relaying.forms import rename_model_field
from conveyor_gateway.relaying.long_bodies import find_long_model


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": "qwen", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json"),
        (b'{"model": "qwen", "x": NaN}', "invalid_json"),
        (b'{"model": "qwen"} {}', "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"qwen"', "invalid_json"),
        (b"{}", "no_model"),
        (b'{"model": 7}', "no_model"),
        (b'{"model": null}', "no_model"),
    ],
)
def test_a_body_without_a_model_to_read_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(GatewayError) as caught:
        read_model(body)
    assert caught.value.code == code
    assert caught.value.status == 400


def test_a_body_with_a_lone_surrogate_is_routed_and_its_engine_replaces_it() -> None:
    body = rb'{"messages": [{"content": "\ud83d..."}], "model": "a/b", "stream": true}'
    assert read_model(body) == "a/b"
    assert rename_model(body, "q") == body.replace(b"a/b", b"q")
    assert requests_stream(body)
    assert read_queue_fields(body).messages != NO_FIELDS.messages


MIB = b"x" * MAX_ROUTED_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "a/b", "prompt": "%s"}' % MIB,
        b'{"prompt": "%s", "model" : "a\\/b" }' % MIB,
        b'{"prompt": "%s", "model": "a/b", "tools": [{"model": "x"}]}' % MIB,
        b'{"model": "a/b", "tools": [{"model": "x"}], "prompt": "%s"}' % MIB,
        b'{"model": "a/b", "prompt": "%s", "tools": [{"model": "x"}]}' % MIB,
        b'{"model": "x", "prompt": "%s", "model": "a/b"}' % MIB,
        b'{"input": ["\\"model\\": \\"x\\"", "%s"], "model": "a/b", "n": 1}' % MIB,
    ],
    ids=lambda body: body.replace(MIB, b"...").decode(),
)
def test_a_long_body_names_its_model_near_an_end(body: bytes) -> None:
    found = find_long_model(body)
    assert found.model == "a/b"
    assert json.loads(rename_model_field(body, found, "q")) == {**json.loads(body), "model": "q"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "%s"}' % MIB,
        b'{"tool": {"model": "x"}, "prompt": "%s"}' % MIB,
        b'{"prompt": "%s", "tool": {"model": "x"}}' % MIB,
        b'{"a": "%s", "model": "a/b", "b": "%s"}' % (MIB, MIB),
        b'{"model": "a/b' + MIB,
        b'{"m\\u006fdel": "a/b", "prompt": "%s"}' % MIB,
        b'{"model": 5, "prompt": "%s"}' % MIB,
        b'{"model": "\\ud800", "prompt": "%s"}' % MIB,
        b'{"model": "\xff", "prompt": "%s"}' % MIB,
        b'"model":"a"' * 200_000,
        b'{"model":' + b" " * (8 << 20) + b'"a"}',  # it takes 1 ms to see that the name is too far from the key
        b'{"x": [' + b'{"model":"x"},' * 100_000 + b'0], "model": 5}',
    ],
    ids=lambda body: repr(body.replace(MIB, b"...")[:60]),
)
def test_a_long_body_without_a_model_near_an_end_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError, match="within this distance of its beginning or end") as caught:
        find_long_model(body)
    assert caught.value.code == "no_model"


def test_renaming_the_model_changes_nothing_else() -> None:
    text = '{"model": "default/qwen", "prompt": "h\\u00e9 \\ud83d\\ude00", "n": 12345678901234567890, "t": 0.10}'
    assert read_model(text.encode()) == "default/qwen"
    renamed = rename_model(text.encode(), "qwen").decode()
    assert json.loads(renamed) == {**json.loads(text), "model": "qwen"}
    assert '"h\\u00e9 \\ud83d\\ude00"' in renamed
    assert "0.10" in renamed


def test_of_two_models_the_last_counts_as_for_the_engine() -> None:
    assert read_model(b'{"model": "a", "m\\u006fdel": "b"}') == "b"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"model":"a/b"}], "model" : "a/b" , "top_p":1}',
        b'{"x":"\\"model\\":\\"a/b\\"","model":"a\\/b"}',
        b'{"model":"a/b","tool":{"model":"a/b"}}',
        b'{"model":"x","model":"a/b"}',
    ],
)
def test_only_the_model_of_the_body_itself_is_replaced(body: bytes) -> None:
    renamed = rename_model(body, "q")
    assert json.loads(renamed) == {**json.loads(body), "model": "q"}


def test_a_model_that_is_not_found_is_an_error_that_says_what_to_do() -> None:
    decoys = b'{"x":[' + b'{"model":"a"},' * 10 + b'0],"model":"a"}'
    for body in (b'{"m\\u006fdel":"a"}', decoys):
        with pytest.raises(GatewayError, match="once and without escapes, before other members"):
            rename_model(body, "q")


@pytest.mark.parametrize("member", [b'"%x":0,', b'"":0,', b'"model":"b",'])
def test_replacing_the_model_splits_the_body_into_no_members(member: bytes) -> None:
    members = b"".join(member % number if b"%" in member else member for number in range(50_000))
    body = b"{" + members + b'"model":"a/b"}'
    tracemalloc.start()
    try:
        renamed = rename_model(body, "q")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
    assert renamed == b"{" + members + b'"model":"q"}'


@pytest.mark.parametrize("piece", [b"[[[[[]]]]],", b"{},", b'{"a":1},', b"1e9,"])
def test_finding_the_model_builds_nothing_of_the_rest(piece: bytes) -> None:
    body = b'{"model":"m","x":[' + (piece * (MAX_ROUTED_BYTES // len(piece)))[:-1] + b"]}"
    tracemalloc.start()
    try:
        assert read_model(body) == "m"
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
