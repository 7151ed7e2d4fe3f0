"""Requests to Open WebUI's own server as its page sends them, with a stream."""

import json

import httpx
from checks import MODEL, QUESTION, run
from open_webui import BASE, serving

http = httpx.Client(base_url=BASE, timeout=60)


def models() -> None:
    token = http.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status().json()["token"]
    http.headers["Authorization"] = f"Bearer {token}"
    assert MODEL in [model["id"] for model in http.get("/api/models").raise_for_status().json()["data"]]


def send(messages: list[dict[str, str]]) -> str:
    """Return the text of a streamed answer."""
    body = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 24}
    pieces = []
    with http.stream("POST", "/api/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    assert len(pieces) > 2
    return "".join(pieces)


def a_conversation() -> None:
    messages = [{"role": "user", "content": QUESTION}]
    first = send(messages)
    assert first
    assert send([*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "And a list?"}])


with serving():
    run(models, a_conversation)
