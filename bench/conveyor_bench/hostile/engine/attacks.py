"""The attacks of the command `hostile-engine`: bodies, and what connections send before they stall. Pure."""

import json
from collections.abc import Callable

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
        "too many logprobs": (COMPLETION, json.dumps({**many, "max_tokens": 8000, "logprobs": 20}).encode(), None),
    }


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
