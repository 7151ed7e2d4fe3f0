"""Tests what the gateway knows about images in bodies: how many of their bytes there are, and so how many tokens."""

import base64
import json
import random
from typing import Any

import pytest
from tests.gateway.builders import make_known_service

from conveyor_gateway.relaying.bodies import read_queue_fields
from conveyor_gateway.relaying.images import estimate_image_bytes
from conveyor_gateway.relaying.work import estimate_work

TEXT = "The quick brown fox jumps over the lazy dog. "


def write(*parts: str) -> bytes:
    """Return a chat with texts and images."""
    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 10}).encode()


def picture(num_bytes: int, seed: int = 0) -> str:
    data = random.Random(seed).randbytes(num_bytes)
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("size", [20_000, 300_000, 3_000_000])
def test_about_as_many_bytes_are_found_as_images_have(size: int) -> None:
    images = [picture(size, seed) for seed in range(3)]
    expected = sum(map(len, images))
    body = write(TEXT * 1000, *images, TEXT * 3000)
    assert abs(estimate_image_bytes(body) - expected) < 0.1 * expected + 8192


@pytest.mark.parametrize(
    "text",
    [
        "x" * 100_000, TEXT * 50_000, "\u4f60\u597d " * 50_000, "x = 1 \\ " * 50_000,
        ("b" * 60 + " ") * 9000, "/usr/share/doc/ " * 9000, ("b" * 60 + "\n") * 9000,
    ],
)  # fmt: skip
def test_texts_are_no_images(text: str) -> None:
    body = write(text)
    assert estimate_image_bytes(body) == 0
    assert estimate_image_bytes(json.dumps({"prompt": list(range(100_000))}).encode()) == 0


@pytest.mark.parametrize("size", [100, 1600, 3000, 5000, 9000, 20_000])
def test_no_more_bytes_are_found_than_there_are(size: int) -> None:
    body = write(picture(size))
    assert 0 <= estimate_image_bytes(body) <= len(body)


def test_base64_may_have_line_breaks() -> None:
    data = base64.encodebytes(random.Random(0).randbytes(300_000)).decode()
    body = write(f"data:image/png;base64,{data}")
    assert abs(estimate_image_bytes(body) - len(body)) < 0.05 * len(body)


def test_images_count_as_text_where_no_engine_reports_tokens() -> None:
    service = make_known_service("a/b", max_model_len=131_072, task=None)
    body = write(picture(300_000))
    work = estimate_work(service, body, read_queue_fields(body), may_generate=True)
    assert work.prompt_tokens == len(body) // 4


def test_an_image_counts_as_about_the_tokens_of_its_pixels() -> None:
    service = make_known_service("a/b", max_model_len=131_072, task="Generate")

    def expect(*parts: str) -> int:
        body = write(*parts)
        return int(estimate_work(service, body, read_queue_fields(body), may_generate=True).prompt_tokens)

    text = expect(TEXT * 100)
    assert text == len(write(TEXT * 100)) // 4
    assert 800 < expect(TEXT * 100, picture(300_000)) - text < 4000
    assert expect(TEXT * 100_000, picture(300_000)) == 131_072
