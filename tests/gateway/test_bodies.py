"""Bodies that only the root has to read. How long and how slow they may be is tested in test_gateway."""

import json

import pytest

from conveyor_gateway.bodies import parse_body, rename_model
from conveyor_gateway.errors import EncodedBody, InvalidRequest


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"qwen"', "invalid_json"),
        (b"{}", "no_model"),
        (b'{"model": 7}', "no_model"),
        (b'{"model": null}', "no_model"),
    ],
)
def test_a_body_without_a_model_to_read_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_body(body, None)
    assert caught.value.code == code
    assert caught.value.status == 400


def test_a_compressed_body_is_refused_with_what_to_do() -> None:
    with pytest.raises(EncodedBody, match="uncompressed, or to /<namespace>") as caught:
        parse_body(b"\x1f\x8b", "gzip")
    assert caught.value.status == 415


def test_renaming_the_model_changes_nothing_else() -> None:
    text = '{"model": "default/qwen", "prompt": "h\\u00e9 \\ud83d\\ude00 \\ud800", "n": 12345678901234567890, "t": 0.1}'
    fields = parse_body(text.encode(), "identity")
    assert json.loads(rename_model(fields, "qwen")) == {**json.loads(text), "model": "qwen"}
