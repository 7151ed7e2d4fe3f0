"""Tests the life of a `serve` process: what ends its requests, what ends the process, and its last messages.

The engine computes nothing where it does not matter what it computes.
"""

import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.processes import IDLE, REAL, EngineServer, children, wait_until

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.serving import server as module
from conveyor_engine.serving.preparing.jobs import ServedModel
from conveyor_engine.serving.preparing.process import ForkServer
from conveyor_engine.serving.preparing.sampling_defaults import SamplingDefaults
from conveyor_engine.text.tokenizer import Tokenizer

LONG = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
Start = Callable[..., EngineServer]


@pytest.fixture(scope="module")
def server(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """A server for all tests that do not change it. It has two places in the batch and two in the queue."""
    folder = tmp_path_factory.mktemp("server")
    with EngineServer(folder, chat_model, IDLE, max_num_seqs=2, max_num_queued_requests=2) as started:
        yield started.wait_ready()


@pytest.fixture
def start(chat_model: Path, tmp_path: Path) -> Iterator[Start]:
    """A function that starts a ready server with these fields changed."""
    started: list[EngineServer] = []

    def begin(program: str = IDLE, **fields: Any) -> EngineServer:
        started.append(EngineServer(tmp_path / str(len(started)), chat_model, program, **fields))
        return started[-1].wait_ready()

    yield begin
    for server in started:
        server.__exit__()


class Call(threading.Thread):
    """A request in its own thread. `lines` grows as the stream arrives."""

    def __init__(self, server: EngineServer, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._body = server.url + "/v1/completions", body
        self.status = 0
        self.lines: list[str] = []
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            self.status = response.status_code
            rest = b""
            for piece in response.iter_raw():  # a body's text may hold what iter_lines takes for the end of a line
                *lines, rest = (rest + piece).split(b"\n")
                self.lines.extend(line.decode() for line in lines if line)
            self.lines.extend([rest.decode()] if rest else [])

    def finish(self) -> "Call":
        self.join(timeout=150)
        assert not self.is_alive()
        return self

    @property
    def last(self) -> Any:
        """The last event's or the whole body's JSON; "[DONE]" as it is."""
        data = self.lines[-1].removeprefix("data: ")
        return data if data == "[DONE]" else json.loads(data)


@contextmanager
def open_connection(
    server: EngineServer, body: dict[str, Any], *headers: str, missing_bytes: int = 0
) -> Iterator[socket.socket]:
    """A raw request on its way, so that the client can vanish at will; without the body's last bytes."""
    content = json.dumps(body).encode()
    lines = ("POST /v1/completions HTTP/1.1", "Host: a", f"Content-Length: {len(content)}", *headers, "", "")
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as connection:
        connection.sendall("\r\n".join(lines).encode() + content[: len(content) - missing_bytes])
        yield connection


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_choices_streamed_or_not(server: EngineServer, stream: bool) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    with open_connection(server, LONG | {"stream": stream, "n": 2}) as connection:
        server.wait_load(running=2)
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    server.wait_load(running=0, waiting=0, kv_cache_usage=0.0)
    assert server.metric("vllm:request_success_total", finished_reason="abort") - before == 2


def test_a_client_that_leaves_while_it_waits_is_forgotten(server: EngineServer) -> None:
    with open_connection(server, LONG | {"n": 2}):
        server.wait_load(running=2)
        with open_connection(server, LONG):
            server.wait_load(running=2, waiting=1)
        server.wait_load(running=2, waiting=0)
    server.wait_load(running=0, waiting=0)


def test_a_full_queue_answers_429_and_takes_requests_again(server: EngineServer) -> None:
    with open_connection(server, LONG | {"n": 2}):
        server.wait_load(running=2)
        with open_connection(server, LONG | {"n": 2}):
            server.wait_load(running=2, waiting=2)
            for stream in (True, False):
                refused = server.post("/v1/completions", LONG | {"stream": stream})
                assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
                assert refused.json()["error"]["code"] == "queue_full"
    server.wait_load(running=0, waiting=0)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    assert 'vllm:admission_rejections_total{model_name="tiny",reason="queue_full"} ' in server.get("/metrics").text


def test_requests_whose_bodies_are_still_on_their_way_take_no_places(server: EngineServer) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    with ExitStack() as arriving:
        for _ in range(20):
            arriving.enter_context(open_connection(server, body, missing_bytes=1))
        assert server.post("/v1/completions", body | {"n": 4}).status_code == 200


def test_the_time_limit_begins_before_the_body_arrives(server: EngineServer) -> None:
    with open_connection(server, {"prompt": "a"}, "X-Request-Timeout-Seconds: 0.1", missing_bytes=1) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 504")


def test_a_request_is_taken_whole_or_not_at_all(server: EngineServer) -> None:
    with open_connection(server, LONG | {"n": 2}):
        server.wait_load(running=2)
        assert server.post("/v1/completions", LONG | {"n": 3}).status_code == 429
        server.wait_load(running=2, waiting=0)
    server.wait_load(running=0, waiting=0)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "n": 4}).status_code == 200
    assert server.post("/v1/completions", LONG | {"n": 5}).status_code == 400  # it could never be taken


@pytest.mark.slow
def test_sigterm_lets_open_requests_finish_and_refuses_new_ones(start: Start) -> None:
    server = start(REAL)
    body = LONG | {"max_tokens": 300}
    stream = Call(server, body | {"stream": True})
    wait_until(lambda: stream.lines, "a first token", server)
    with stopped(server.engine_pid):  # so that they are open as long as it takes to look
        whole = Call(server, body)
        server.wait_load(waiting=1)
        server.terminate()
        wait_until(lambda: server.get("/readyz").status_code == 503, "not ready", server)
        assert server.get("/livez").status_code == 200
        assert server.load()["draining"] is True
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    assert stream.finish().last == "[DONE]"
    assert json.loads(stream.lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert whole.finish().last["usage"]["completion_tokens"] == 300
    assert server.wait_exit() == 0
    assert not server.termination_path.exists()


@pytest.mark.parametrize("with_server", [True, False], ids=["a signal to all", "its workers' end"])
def test_without_its_workers_a_server_drains(start: Start, with_server: bool) -> None:
    """A signal to a process group reaches them too, and is one signal."""
    server = start(REAL)
    fork_server = next(pid for pid in children(server.process.pid) if pid != server.engine_pid)
    stream = Call(server, LONG | {"max_tokens": 300, "stream": True})
    wait_until(lambda: stream.lines, "a first token", server)
    with stopped(server.engine_pid):
        for pid in (fork_server, *children(fork_server), *[server.process.pid][: int(with_server)]):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: server.load()["draining"], "draining", server)
    assert stream.finish().last == "[DONE]"
    assert server.wait_exit() == 0


@pytest.mark.slow
@pytest.mark.parametrize("by", ["timeout", "second signal"])
def test_at_the_end_of_the_drain_requests_are_ended_in_words(start: Start, by: str) -> None:
    server = start(drain_timeout_seconds=0.5 if by == "timeout" else 100)
    stream, whole = Call(server, LONG | {"stream": True}), Call(server, LONG)
    server.wait_load(running=2)
    wait_until(lambda: stream.lines, "a first token", server)
    server.terminate()
    if by == "second signal":
        wait_until(lambda: server.load()["draining"], "draining", server)
        server.terminate()
    assert stream.finish().last["error"]["code"] == "unavailable"
    assert whole.finish().status == 503
    assert server.wait_exit() == 0


@pytest.mark.slow  # an engine counts as stuck after 20 silent seconds
def test_a_stuck_engine_is_reported_and_sigterm_ends_its_requests_at_once(start: Start) -> None:
    server = start(drain_timeout_seconds=1000)
    stream, whole = Call(server, LONG | {"stream": True}), Call(server, LONG)
    server.wait_load(running=2)
    wait_until(lambda: stream.lines, "a first token", server)
    with stopped(server.engine_pid):
        wait_until(lambda: server.get("/livez").status_code == 503, "stuck", server)
        assert server.get("/readyz").json()["status"] == "stuck"
        server.terminate()
        assert stream.finish().last["error"]["code"] == "unavailable"
        assert whole.finish().status == 503
        assert server.wait_exit() == 0


@pytest.fixture
def fork_server(chat_model: Path) -> ForkServer:
    return ForkServer(ServedModel("tiny", Tokenizer(chat_model), SamplingDefaults()))


async def test_a_server_that_fails_ends_the_process(
    chat_model: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("no more sockets")

    monkeypatch.setattr(module._Server, "startup", fail)
    config = EngineConfig(model=str(chat_model), task="generate", device="cpu", host="127.0.0.1", port=0)
    with pytest.raises(OSError, match="no more sockets"):
        await module.serve(config, fork_server)


@pytest.mark.slow
def test_when_the_engine_is_killed_every_request_is_answered_and_the_server_exits(start: Start) -> None:
    server = start(max_num_seqs=2)
    stream, whole, waiting = Call(server, LONG | {"stream": True}), Call(server, LONG), None
    server.wait_load(running=2)
    waiting = Call(server, LONG)
    server.wait_load(running=2, waiting=1)
    wait_until(lambda: stream.lines, "a first token", server)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert stream.finish().last["error"]["code"] == "engine_dead"
    for call in (whole.finish(), waiting.finish()):
        assert call.status == 502
        assert call.last["error"]["code"] == "engine_dead"
        assert "SIGKILL" in call.last["error"]["message"]
    assert server.wait_exit() == 1
    assert server.termination() == {"reason": "EngineError", "message": "the engine process was ended by SIGKILL"}


def test_when_the_server_is_killed_its_processes_leave(start: Start) -> None:
    server = start()
    fork_server = next(pid for pid in children(server.process.pid) if pid != server.engine_pid)
    workers = children(fork_server)
    assert len(workers) == 3
    with open_connection(server, LONG):
        server.wait_load(running=1)
        server.process.kill()
        server.wait_exit()
    for pid in (server.engine_pid, fork_server, *workers):
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of all")  # noqa: B023


def test_probes_answer_while_the_engine_loads(chat_model: Path, tmp_path: Path) -> None:
    with EngineServer(tmp_path, chat_model) as server:
        assert server.get("/livez").status_code == 200
        assert server.get("/readyz").json() == {"status": "starting"}
        assert server.get("/health").status_code == 503
        refused = server.post("/v1/completions", {"prompt": "a"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        server.terminate()
        assert server.wait_exit() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "reason", "words", "code"),
    [
        ({"max_num_seqs": 0}, "InvalidConfig", "flag --max-num-seqs: `max_num_seqs` must be a whole number", 2),
        ({"speed": 3}, "InvalidConfig", "--speed", 2),
        ({"device": "cuda"}, "NoDevice", "no CUDA device", 1),
        ({"workload_input_tokens": "8,16"}, "InvalidConfig", "set `workload_output_tokens` too", 2),
    ],
)
def test_what_cannot_start_says_why(
    chat_model: Path, tmp_path: Path, fields: dict[str, object], reason: str, words: str, code: int
) -> None:
    with EngineServer(tmp_path, chat_model, **fields) as server:
        assert server.wait_exit() == code, server.log
        assert server.termination()["reason"] == reason
        assert words in server.termination()["message"]


def test_a_model_that_is_not_there_says_so(tmp_path: Path) -> None:
    with EngineServer(tmp_path, tmp_path / "nothing") as server:
        assert server.wait_exit() == 1
        assert server.termination()["reason"] == "ModelNotFound"


def test_a_draft_model_with_far_too_many_layers_is_refused_before_it_is_built(chat_model: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(chat_model, draft)
    config = json.loads((draft / "config.json").read_text()) | {"num_hidden_layers": 60_000}
    (draft / "config.json").write_text(json.dumps(config))
    with EngineServer(tmp_path, chat_model, speculation="draft", draft_model=draft) as server:
        assert server.wait_exit() == 1
        assert server.termination()["reason"] == "UnsupportedModel"
        assert server.termination()["message"].startswith("`draft_model`: ")
        assert "num_hidden_layers is 60000, and may be 4096 at most" in server.termination()["message"]


def test_by_default_a_server_answers_ipv4_and_ipv6(chat_model: Path, tmp_path: Path) -> None:
    host = EngineConfig(model=str(chat_model)).host
    with EngineServer(tmp_path, chat_model, IDLE, host=host) as server:
        port = httpx.URL(server.url).port
        for address in ("127.0.0.1", "[::1]"):
            assert server.client.get(f"http://{address}:{port}/livez").status_code == 200


def test_a_port_in_use_says_so(chat_model: Path, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        EngineServer(tmp_path, chat_model, port=taken.getsockname()[1]) as server,
    ):
        assert server.wait_exit() == 2
        assert "cannot listen" in server.termination()["message"]


def test_the_log_has_nothing_that_a_client_sends(start: Start) -> None:
    marker = "marker-of-a-client"
    server = start(REAL)
    completion = {"prompt": marker, "user": marker, "stop": [marker], "max_tokens": 2}
    assert server.post("/v1/completions", completion, Authorization=f"Bearer {marker}").status_code == 200
    chat = {"messages": [{"role": "user", "content": marker}], "max_tokens": 2}
    assert server.post(f"/v1/chat/completions?key={marker}", chat).status_code == 200
    assert server.post("/v1/completions", f'{{"prompt": "{marker}'.encode()).status_code == 400
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": marker}).status_code == 400
    assert server.get(f"/{marker}").status_code == 404
    server.terminate()
    assert server.wait_exit() == 0
    assert "listening" in server.log
    assert marker not in server.log
