"""Starts Open WebUI's own server, which has the service as its only OpenAI connection: `serving`."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from checks import URL

BASE = "http://127.0.0.1:19480"
START_SECONDS_MAX = 400
SETTINGS = {
    "OPENAI_API_BASE_URL": URL, "OPENAI_API_KEY": "any", "ENABLE_OLLAMA_API": "False", "WEBUI_AUTH": "False",
    "OFFLINE_MODE": "True", "HF_HUB_OFFLINE": "1", "RAG_EMBEDDING_ENGINE": "openai", "ANONYMIZED_TELEMETRY": "False",
}  # fmt: skip


@contextmanager
def serving(**settings: str) -> Iterator[str]:
    """Yield the base URL of a server without accounts. Prints the end of its log if the block fails."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(sys.executable).with_name("open-webui")
        command = [program, "serve", "--host", httpx.URL(BASE).host, "--port", str(httpx.URL(BASE).port)]
        environment = os.environ | SETTINGS | settings | {"DATA_DIR": folder}
        with (Path(folder) / "log").open("wb") as log:
            server = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_healthy(server)
            yield BASE
        except BaseException:
            print((Path(folder) / "log").read_text()[-2000:])
            raise
        finally:
            server.terminate()
            server.wait()


def _wait_healthy(server: subprocess.Popen[bytes]) -> None:
    for _ in range(START_SECONDS_MAX):
        assert server.poll() is None, "open-webui ended"
        try:
            if httpx.get(f"{BASE}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise AssertionError("open-webui did not start")
