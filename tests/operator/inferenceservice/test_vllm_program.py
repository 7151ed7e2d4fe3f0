"""Tests what pods with vLLM run: the real script that waits for vLLM's requests, and the address of vLLM's port."""

import http.server
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.api.builders import build_body
from tests.operator.builders import OWNER, SETTINGS

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.manifests.config import build_engine_config
from conveyor_operator.inferenceservice.manifests.vllm import build_vllm, read_over_tls
from e2e.cluster.certificates import Authority

VLLM = {"runtime": "VLLM", "engine": {"image": "vllm/vllm-openai:v0.11.0"}}
IDLE, BUSY = b"vllm:num_requests_running 0.0\n", b"vllm:num_requests_running 1.0\n"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def build_command(port: int, drain_seconds: float) -> list[str]:
    """Return the command of preStop, for vLLM at another port, without the wait for the gateways."""
    spec = InferenceService.parse(build_body(**VLLM)).spec
    _, flag, script, _, _ = build_vllm(spec).pre_stop["exec"]["command"]
    assert f":{names.ENGINE_PORT}/" in script
    script = script.replace(f":{names.ENGINE_PORT}/", f":{port}/")
    return [sys.executable, flag, script, "0", str(drain_seconds)]


@contextmanager
def serving(port: int, answer: Callable[[int], bytes], tls: ssl.SSLContext | None = None) -> Iterator[list[str]]:
    """Serve pages on the port: `answer` gets the number of the request. Yields the paths that were read."""
    paths: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.wfile.write(answer(len(paths)))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield paths
        server.shutdown()


def page(counts: bytes) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + counts


def test_the_pod_waits_on_while_vllm_does_not_answer(port: int) -> None:
    """vLLM's page is slow or closed when vLLM is busy. A failed hook would let the kubelet end vLLM at once."""
    answers = {1: b"", 2: b"no HTTP\r\n\r\n", 3: page(b"vllm:num_requests_running x\n"), 4: page(BUSY)}
    command = build_command(port, 60)
    proxies = {"http_proxy": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9"}
    with (
        subprocess.Popen(command, env=proxies, stderr=subprocess.PIPE) as waiting,
        serving(port, lambda number: answers.get(number, page(IDLE))) as paths,
    ):
        _, errors = waiting.communicate(timeout=50)
    assert (waiting.returncode, len(paths)) == (0, 5), errors.decode()


def test_the_pod_stops_waiting_when_the_time_is_over(port: int) -> None:
    done = subprocess.run(build_command(port, 1), capture_output=True, timeout=50)
    assert done.returncode == 0
    assert b"refused" in done.stderr


def test_the_pod_reads_a_vllm_that_serves_tls(port: int, tmp_path: Path) -> None:
    pair = Authority(tmp_path, "ca").issue("engine", "engine", names=("*.team.svc",))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    command = build_command(port, 30)
    command[2] = read_over_tls(command[2])
    with serving(port, lambda _: page(IDLE), tls) as paths:
        done = subprocess.run(command, capture_output=True, timeout=50)
    assert (done.returncode, paths, done.stderr) == (0, ["/metrics"], b"")


@pytest.mark.parametrize(("pod_ip", "host"), [("fd00::7", "::"), ("10.0.0.7", None), ("", None)])
def test_vllm_listens_where_gateways_reach_it(pod_ip: str, host: str | None) -> None:
    spec = InferenceService.parse(build_body(**VLLM)).spec
    settings = replace(SETTINGS, pod_ip=pod_ip)
    config = yaml.safe_load(build_engine_config(OWNER, spec, settings.has_ipv6).text)
    assert config.get("host") == host
