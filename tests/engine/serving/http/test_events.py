"""Tests the bytes of server-sent events."""

import json

import msgspec

from conveyor_engine.serving.http.events import event


def test_an_event_is_one_line_to_readers_that_know_unicodes_line_ends_too() -> None:
    text = "a\u0085b\u2028c\u2029d\x0be\x1cf\ng\u00e9"
    line, empty = event(msgspec.json.encode(text)).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == text
    assert empty == ""
