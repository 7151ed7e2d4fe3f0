"""The engine as the first process of a container, which gets only the signals that it handles."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SILENT_HUB = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
client, _ = server.accept()
print("asked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_a_fetch_that_hangs_ends_on_sigterm(tmp_path: Path) -> None:
    hub = [sys.executable, "-c", SILENT_HUB]
    with subprocess.Popen(hub, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as silent:
        assert silent.stdout is not None
        endpoint = f"http://127.0.0.1:{int(silent.stdout.readline())}"
        engine = [sys.executable, "-m", "conveyor_engine", "fetch", "--uri=hf://a/b", f"--target={tmp_path}"]
        command = ["unshare", "--pid", "--fork", "--kill-child", *engine]
        with subprocess.Popen(command, env={**os.environ, "HF_ENDPOINT": endpoint}) as first:
            silent.stdout.readline()  # it asks, and gets no answer
            children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
            try:
                assert first.wait(30) == 128 + signal.SIGTERM
            finally:
                first.kill()  # and with it, the engine
                silent.communicate("")
