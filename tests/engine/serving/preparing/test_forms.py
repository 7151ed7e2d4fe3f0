"""Forms with files: what they hold, in order, and what makes them invalid."""

import random
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.builders import make_facts

from conveyor_engine.errors import ErrorCode, InvalidRequest, UnknownModel
from conveyor_engine.serving.preparing.forms import FIELD_BYTES_MAX, is_form, parse_form
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.tasks.imageclassify.bodies import ImageOptions
from conveyor_engine.tasks.imagegenerate.bodies import ImageEditOptions
from conveyor_engine.wire.worker import Job

MODEL = ServedModel("tiny", None, SamplingDefaults())
TYPE = "multipart/form-data; boundary=xYz"
FILES = [random.Random(number).randbytes(length) for number, length in enumerate((5, 100_000, 1))]


def parse(body: bytes, content_type: str = TYPE, files_max: int = 3) -> tuple[ImageOptions, list[bytes]]:
    job = Job("images", make_facts(), 1, 0.0, body, content_type=content_type)
    return parse_form(MODEL, ImageOptions, job, "image", files_max)


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--xYz\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xYz--\r\n"


FILE = part("image", b"x")


def test_fields_and_files_are_what_a_client_has_sent() -> None:
    files = [("image", ("a b.jpg", data, "image/jpeg")) for data in FILES]
    request = httpx.Request("POST", "http://a", data={"model": "tiny", "top_k": "3", "other": "é"}, files=files)
    fields, found = parse(request.read(), request.headers["content-type"])
    assert (fields.model, fields.top_k, fields.function_to_apply, fields.ignored) == ("tiny", 3, "default", 1)
    assert found == FILES


def test_a_form_is_known_by_its_content_type() -> None:
    assert is_form("Multipart/Form-Data; boundary=a")
    assert not any(map(is_form, ("application/json", "", "multipart/mixed; boundary=a")))


@pytest.mark.parametrize(
    ("body", "content_type", "param"),
    [
        (form(FILE), "multipart/form-data", None),
        (form(FILE), "multipart/form-data; boundary=other", None),
        (form(FILE), "multipart/form-data; boundary=" + "b" * 300, None),
        (form(FILE)[:-4], TYPE, None),
        (FILE, TYPE, None),
        (b"", TYPE, None),
        (b"--xYz\r\n\r\nx\r\n--xYz--\r\n", TYPE, None),
        (b"--xYz\r\nContent-Disposition: form-data\r\n\r\nx\r\n--xYz--\r\n", TYPE, None),
        (b"--xYz\r\n" + b"a: b\r\n" * 5000, TYPE, None),
        (form(*(part(f"f{number}", b"") for number in range(70)), FILE), TYPE, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_body_that_is_no_form_is_refused(body: bytes, content_type: str, param: None) -> None:
    with pytest.raises(InvalidRequest, match="the body is not a valid multipart/form-data form: ") as caught:
        parse(body, content_type)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_FORM, param)


@pytest.mark.parametrize(
    ("parts", "param", "sentence"),
    [
        ([part("model", b"tiny")], "image", "image is missing"),
        ([FILE] * 4, "image", "more than the 3 that one request may have"),
        ([part("top_k", b"three"), FILE], "top_k", "must be a valid integer"),
        ([part("top_k", b"0"), FILE], "top_k", "must be greater than or equal to 1"),
        ([part("top_k", b"1"), part("top_k", b"2"), FILE], "top_k", "appears in the form twice"),
        ([part("function_to_apply", b"tanh"), FILE], "function_to_apply", "must be 'default'"),
        ([part("model", b"m" * (FIELD_BYTES_MAX + 1)), FILE], "model", "model is longer than 128000 bytes$"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_wrong_field_is_refused_by_name(parts: list[bytes], param: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        parse(form(*parts))
    assert caught.value.param == param


def test_a_long_prompt_is_read_and_a_long_file_of_another_name_is_refused() -> None:
    job = Job(
        "edits", make_facts(), 1, 0.0, form(part("prompt", "\U0001f600".encode() * 32_000), FILE), content_type=TYPE
    )
    fields, _ = parse_form(MODEL, ImageEditOptions, job, "image", 1)
    assert len(fields.prompt) == 32_000
    for name, sentence in (("mask", "an edit changes the whole picture"), ("other", "this path are named image")):
        long = part(name, bytes(200_000), '; filename="a.png"')
        job.body = form(part("prompt", b"a"), long, FILE)
        with pytest.raises(InvalidRequest, match=sentence) as caught:
            parse_form(MODEL, ImageEditOptions, job, "image", 1)
        assert caught.value.param == name


def test_a_field_without_text_counts_as_absent() -> None:
    """As pages send the fields that a user leaves empty."""
    fields, files = parse(form(*(part(name, b"") for name in ("model", "top_k", "function_to_apply")), FILE))
    assert (fields, len(files)) == (ImageOptions(), 1)


def test_a_form_for_another_model_is_refused() -> None:
    with pytest.raises(UnknownModel):
        parse(form(part("model", b"other"), FILE))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_form_or_an_invalid_request(body: bytes) -> None:
    for each in (body, b"--xYz\r\n" + body, form(part("image", body))):
        try:
            files: Any = parse(each)[1]
        except InvalidRequest:
            continue
        assert files
