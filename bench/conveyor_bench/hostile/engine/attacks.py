"""The attacks of the command `hostile-engine`: bodies, and what connections send before they stall. Pure."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

BODY_BYTES = 4 * 2**20 - 64
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Attack = tuple[str, bytes, bytes | None]  # path, body, and the body that it is compared with (or None)


def fill(begin: str, item: str, end: str) -> bytes:
    """Return JSON of nearly 4 MiB."""
    count = (BODY_BYTES - len(begin) - len(end)) // (len(item) + 1)
    return (begin + ",".join([item] * count) + end).encode()


def bodies() -> dict[str, Attack]:
    user = '{"role":"user","content":"hi"}'
    keys = ("{" + ",".join(f'"k{i}":0' for i in range(300_000)) + "}").encode()
    text = "the quick brown fox " * 100_000
    many = {"prompt": text[:13], "n": 128, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    plain = json.dumps(many).encode()
    stops = [chr(0x4E00 + i) + "a" * 998 + "b" for i in range(8)] + ["a" * (999 - i) + "b" for i in range(8)]
    return {
        "wrong messages": (CHAT, fill('{"messages":[', "1", "]}"), None),
        "empty messages": (CHAT, fill('{"messages":[', "{}", "]}"), None),
        "many messages": (CHAT, fill('{"max_tokens":1,"messages":[', user, "]}"), None),
        "unknown keys": (COMPLETION, keys, None),
        "too many ids": (COMPLETION, fill('{"max_tokens":1,"prompt":[', "1", "]}"), None),
        "many prompts": (COMPLETION, fill('{"max_tokens":1,"prompt":[', "[1]", "]}"), None),
        "long text": (COMPLETION, json.dumps({"prompt": text, "max_tokens": 1}).encode(), None),
        "nested": (COMPLETION, b'{"prompt":' + b"[" * 2_000_000 + b"]" * 2_000_000 + b"}", None),
        "16 stops, n=128": (COMPLETION, json.dumps({**many, "stop": stops}).encode(), plain),
        "logprobs 20, n=128": (COMPLETION, json.dumps({**many, "logprobs": 20}).encode(), plain),
        **{
            name: (COMPLETION, json.dumps({"prompt": "a", "max_tokens": 100, **form}).encode(), None)
            for name, form in forms().items()
        },
        "too many logprobs": (COMPLETION, json.dumps({**many, "max_tokens": 8000, "logprobs": 20}).encode(), None),
    }


def forms() -> dict[str, dict[str, Any]]:
    """Return fields whose grammars cost too much to compile, or to follow."""

    def meet(count: int) -> dict[str, Any]:
        terms = (f"/(?s:.*)[a-z]{{{number}}}(?s:.*)/" for number in range(1, count + 1))
        return {"structured_outputs": {"grammar": "start: A\nA: " + " & ".join(terms)}}

    def lead(count: int) -> dict[str, Any]:
        rules = (f'r{number}: "x" r{number + 1}\n' for number in range(count))
        return {"structured_outputs": {"grammar": "start: r0\n" + "".join(rules) + f'r{count}: "y"'}}

    def branch(count: int, *, equal: bool) -> dict[str, Any]:
        items = {"type": "array", "items": {"$ref": "#/$defs/n"}}
        branches = [items if equal else {**items, "maxItems": 1000 + number} for number in range(count)]
        schema = {"$defs": {"n": {"anyOf": [*branches, {"type": "string"}]}}, "$ref": "#/$defs/n"}
        bias = {str(token): 100 for token in range(60, 70)}
        return {"guided_json": schema, "n": 15, "logit_bias": bias, "temperature": 0}

    return {
        "2,675 rules": lead(2_675), "1,000 rules": lead(1_000),
        "29 intersections": meet(29), "17 intersections": meet(17),
        "180 equal branches": branch(180, equal=True), "180 branches": branch(180, equal=False),
    }  # fmt: skip


def pictures() -> dict[str, Attack]:
    """Return chats with images of few bytes and many pixels."""
    large, small = (_save(Image.new("RGB", (side, side), "red")) for side in (4096, 64))
    return {
        "64 bombs": _show([_promise(small, 60_000)] * 64),
        "1,000 images": _show([small] * 1000),
        "60,000 x 1": _show([_save(Image.new("1", (60_000, 1)))] * 64),
        "64 of 16 MP": _show([large] * 64),
        "2 of 16 MP": _show([large] * 2),
    }


def _show(images: list[bytes]) -> Attack:
    urls = (f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images)
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return CHAT, json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode(), None


def _save(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _promise(image: bytes, side: int) -> bytes:
    """Return the PNG with a header that promises this side."""
    header = b"IHDR" + struct.pack(">II", side, side) + image[24:29]
    return image[:12] + header + struct.pack(">I", zlib.crc32(header)) + image[33:]


def patterns(number: int) -> bytes:
    """Return a body whose schema takes a worker its whole CPU time. Each number has its own schema."""
    terms = [{"type": "string", "pattern": f".*[a-z]{{{number + length}}}.*"} for length in range(1, 41)]
    return json.dumps({"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": {"allOf": terms}}}).encode()


def build_head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode()


def connections() -> dict[str, tuple[int, Callable[[int], bytes]]]:
    """Return the number of connections, and the bytes that each sends before it stalls."""
    stream = {"prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True, "logprobs": 20}
    much = json.dumps(stream).encode()
    large = bytes(BODY_BYTES - 1)
    return {
        "1,000 idle": (1000, lambda _: b""),
        "1,000 in a head": (1000, lambda _: b"GET /livez HTTP/1.1\r\nHost: " + b"a" * 8000),
        "100 slow writers": (100, lambda i: build_head(COMPLETION, BODY_BYTES) + (large if i % 4 == 0 else b"{")),
        "100 half-open": (100, lambda _: build_head(COMPLETION, 2) + b"{"),
        "100 slow readers": (100, lambda _: build_head(COMPLETION, len(much)) + much),
    }
