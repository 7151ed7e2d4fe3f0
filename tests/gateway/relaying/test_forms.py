"""Tests forms at the root. The gateway finds the field `model` at their beginning and replaces it in place."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor_gateway.errors import GatewayError
from conveyor_gateway.relaying.forms import (
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    PARTS_MAX,
    find_model_field,
    is_form,
    rename_model_field,
)

TYPE = "multipart/form-data; boundary=xYz"


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--xYz\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xYz--\r\n"


FILE = part("image", random.Random(0).randbytes(200_000), '; filename="a.jpg"\r\nContent-Type: image/jpeg')


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (TYPE, True),
        ("Multipart/Form-Data ; boundary=a", True),
        ("application/json", False),
        ("multipart/mixed; boundary=a", False),
        ("", False),
        (None, False),
    ],
)
def test_a_form_is_known_by_its_content_type(content_type: str | None, expected: bool) -> None:
    assert is_form(content_type) is expected


@pytest.mark.parametrize(
    "content_type", [TYPE, 'multipart/form-data; boundary="xYz"', "multipart/form-data;charset=x;boundary=xYz"]
)
def test_the_model_before_the_files_is_found_and_replaced_where_it_stands(content_type: str) -> None:
    body = form(part("top_k", b"3"), part("model", b"default/pictures"), FILE)
    field = find_model_field(body, content_type)
    assert field.model == "default/pictures"
    renamed = rename_model_field(body, field, "p")
    assert renamed == form(part("top_k", b"3"), part("model", b"p"), FILE)
    assert find_model_field(renamed, content_type).model == "p"


def test_a_long_name_in_place_of_a_short_one() -> None:
    body = form(part("model", b"p"), FILE)
    assert rename_model_field(body, find_model_field(body, TYPE), "q" * 63) == form(part("model", b"q" * 63), FILE)


@pytest.mark.parametrize(
    ("body", "content_type", "code"),
    [
        (form(FILE), TYPE, "no_model"),
        (form(FILE, part("model", b"p")), TYPE, "no_model"),
        (part("model", b"p"), "multipart/form-data", "invalid_form"),
        (part("model", b"p"), "multipart/form-data; boundary=" + "b" * 300, "invalid_form"),
        (part("model", b"p"), "multipart/form-data; boundary=\udce9", "invalid_form"),
        (part("model", b"p"), "multipart/form-data; boundary=other", "invalid_form"),
        (b"", TYPE, "no_model"),
        (b'{"model": "p"}', TYPE, "invalid_form"),
        (b"--xYz\r\n" + b"a: b\r\n" * 5000, TYPE, "invalid_form"),
        (b"--xYz\r\nContent-Disposition: " + b"a" * 100_000, TYPE, "invalid_form"),
        (part("model", b"m" * HEAD_BYTES_MAX), TYPE, "no_model"),
    ],
)
def test_a_form_without_a_model_to_read_is_refused(body: bytes, content_type: str, code: str) -> None:
    with pytest.raises(GatewayError) as caught:
        find_model_field(body, content_type)
    assert (caught.value.code, caught.value.status) == (code, 400)


def test_the_model_is_found_after_as_many_fields_as_an_engine_takes() -> None:
    fields = [part("top_k", b"3")] * (PARTS_MAX - 1)
    assert find_model_field(form(*fields, part("model", b"p")), TYPE).model == "p"


@pytest.mark.parametrize(
    ("pieces", "limit"),
    [
        (b"--xYz\r\n\r\n\r\n" * 5000, f"{PARTS_MAX} parts"),
        (b"--xYz\r\na:\r\n\r\n\r\n" * 5000, f"{PARTS_MAX} parts"),
        ((b"--xYz\r\n" + b"a:\r\n" * 7 + b"\r\n\r\n") * 500, f"{HEADERS_MAX} headers"),
    ],
)
def test_parsing_stops_after_a_number_of_parts_and_headers(pieces: bytes, limit: str) -> None:
    with pytest.raises(GatewayError, match=f"no model in its first {limit}: .* send it as the first field") as caught:
        find_model_field(pieces + part("model", b"p"), TYPE)
    assert (caught.value.code, caught.value.status) == ("no_model", 400)


@given(st.binary(max_size=300), st.text(max_size=40))
def test_any_bytes_are_a_model_or_an_invalid_request(body: bytes, boundary: str) -> None:
    for each in (body, b"--" + boundary.encode(errors="replace") + b"\r\n" + body):
        try:
            field = find_model_field(each, f"multipart/form-data; boundary={boundary}")
        except GatewayError:
            continue
        assert each[field.start : field.end].decode(errors="replace") == field.model
