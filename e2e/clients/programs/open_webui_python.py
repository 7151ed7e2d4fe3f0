"""Open WebUI's own server, which has the service as its only OpenAI connection.

The checks send requests to Open WebUI's server as its page does, with a stream.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from checks import MODEL, QUESTION, URL, run

PORT = 19480
START_SECONDS_MAX = 400
SETTINGS = {
    "OPENAI_API_BASE_URL": URL, "OPENAI_API_KEY": "any", "ENABLE_OLLAMA_API": "False", "WEBUI_AUTH": "False",
    "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai", "ANONYMIZED_TELEMETRY": "False",
}  # fmt: skip
http = httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60)


def wait_healthy(server: subprocess.Popen[bytes]) -> None:
    for _ in range(START_SECONDS_MAX):
        assert server.poll() is None, "open-webui ended"
        try:
            if http.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError("open-webui did not start")


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


with tempfile.TemporaryDirectory() as folder:
    program = Path(sys.executable).with_name("open-webui")
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(PORT)]
    with (Path(folder) / "log").open("wb") as log:
        server = subprocess.Popen(
            command, env=os.environ | SETTINGS | {"DATA_DIR": folder}, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        wait_healthy(server)
        run(models, a_conversation)
    except BaseException:
        print((Path(folder) / "log").read_text()[-2000:])
        raise
    finally:
        server.terminate()
        server.wait()
