"""A server whose log goes to a full disk."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.engine.processes import IDLE, environment, wait_until


@pytest.mark.slow
def test_an_engine_serves_and_ends_without_a_log(chat_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    flags = ["--model", str(chat_model), "--device=cpu", "--dtype=float32", "--host=127.0.0.1", f"--port={port}"]
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", IDLE, "serve", *flags, "--num-kv-blocks=1024"]
        process = subprocess.Popen(command, env=environment(PYTHONUNBUFFERED=""), stdout=full, stderr=full)

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(is_ready, "ready")
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a", "max_tokens": 3})
        assert answer.status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.wait()
