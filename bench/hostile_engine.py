"""What one engine's other clients notice of a hostile one that reaches it directly.

    .venv/bin/python bench/hostile_engine.py [NAME...]

A real engine server with a tiny random model whose context is 131,072 tokens. A stream is read in a process of its own,
alone and beside each attack; what it is compared with does the same work without the attack. Probes come on new
connections. Memory is what all processes grow by together: the proportional set sizes of the API process, its fork
server and its workers, and the resident set of the engine process. Ends with status 1 if a bar is missed; the last line
is one JSON object.
"""

import argparse
import contextlib
import itertools
import json
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is no installed package

from tests.engine import chat_model
from tests.engine.processes import EngineServer, wait_until

CONTEXT_TOKENS = 131_072
BODY_BYTES = 4 * 2**20 - 64
GAP_BAR_MS, MEMORY_BAR_MIB, PROBE_BAR_SECONDS, WAIT_BAR_SECONDS = 50.0, 200.0, 1.0, 1.0
ENGINE_BAR_MIB = 100.0  # of the engine process: it holds 64 MiB of prompts at most (docs/adr/0056)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
Attack = tuple[str, bytes, bytes | None]  # path, body, and what it is compared with (None: nothing)


def fill(begin: str, item: str, end: str) -> bytes:
    """JSON of nearly 4 MiB."""
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


@dataclass(frozen=True, slots=True)
class Row:
    attack: str
    bar: str
    alone: float
    beside: float
    memory_mib: float
    engine_mib: float  # of that, the engine process
    probe_seconds: float
    status: str
    passed: bool


class Prober:
    """Probes every 50 ms on a new connection, and looks at the memory; in threads."""

    def __init__(self, server: EngineServer) -> None:
        self._url = server.url
        self._pid, self._engine_pid = server.process.pid, server.engine_pid
        self._stop = threading.Event()
        self.slowest_seconds = 0.0
        self._before = self._memory()
        self.grown, self.engine_grown = 0.0, 0.0  # MiB at most, of all processes and of the engine process

    def __enter__(self) -> "Prober":
        self._threads = [threading.Thread(target=work) for work in (self._probe, self._watch)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _probe(self) -> None:
        while not self._stop.wait(0.05):
            began = time.monotonic()
            ok = httpx.get(f"{self._url}/livez", timeout=30).status_code == 200
            self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began if ok else 99.0)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            others, engine = self._memory()
            engine -= self._before[1]
            self.grown = max(self.grown, others - self._before[0] + engine)
            self.engine_grown = max(self.engine_grown, engine)

    def _memory(self) -> tuple[float, float]:
        """MiB of the API process, its fork server and all workers, those that have just come too; of the engine."""
        others = sum(_pss(pid) for pid in (self._pid, *_descendants(self._pid, self._engine_pid)))
        return others / 1024, _resident(self._engine_pid) / 2**20


def _descendants(pid: int, without: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if int(word) != without:
                yield int(word)
                yield from _descendants(int(word), without)


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


def _resident(pid: int) -> int:
    """Bytes. Cheap, and nothing that grows in the engine process is shared."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def read_stream(url: str, num_tokens: int) -> list[float]:
    """Milliseconds between the events of one stream."""
    body = {"prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True, "seed": 1}
    times = []
    with httpx.stream("POST", url + COMPLETION, json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


def watch_streams(url: str) -> None:
    """Prints a line when it has streamed once, goes on until its standard input closes, and prints all gaps."""
    gaps: list[float] = []
    ended = threading.Event()

    def end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=end, daemon=True).start()
    read_stream(url, 2)
    print("streaming", flush=True)
    while not ended.is_set():
        gaps += read_stream(url, 200)
    print(json.dumps(gaps))


def p99_gap_beside(server: EngineServer, work: Callable[[], Any]) -> tuple[float, Any]:
    command = [sys.executable, __file__, "--watch", server.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        victim.stdout.readline()  # it streams
        result = work()
        gaps = json.loads(victim.communicate("")[0])
    return quantiles(gaps, n=100)[98], result


def try_body(server: EngineServer, name: str, attack: Attack, times: int, seconds: float) -> Row:
    path, body, compared = attack

    def send(content: bytes) -> str:
        with httpx.Client(timeout=300) as client:
            statuses = {client.post(server.url + path, content=content).status_code for _ in range(times)}
        return ",".join(map(str, sorted(statuses)))

    alone, _ = p99_gap_beside(server, (lambda: send(compared)) if compared else lambda: time.sleep(seconds))
    with Prober(server) as prober:
        beside, status = p99_gap_beside(server, lambda: send(body))
    return make_row(name, "p99 gap, ms", alone, beside, GAP_BAR_MS, prober, status)


def make_row(name: str, what: str, alone: float, beside: float, bar: float, prober: Prober, status: str) -> Row:
    """`bar`: how much more it may be beside the attack."""
    probe_seconds = prober.slowest_seconds
    passed = beside - alone < bar and prober.grown < MEMORY_BAR_MIB and probe_seconds < PROBE_BAR_SECONDS
    return Row(name, what, alone, beside, prober.grown, prober.engine_grown, probe_seconds, status, passed)


def _head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode()


def connections() -> dict[str, tuple[int, Callable[[int], bytes]]]:
    """How many, and what each sends before it falls silent."""
    stream = {"prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True, "logprobs": 20}
    much = json.dumps(stream).encode()
    large = bytes(BODY_BYTES - 1)
    return {
        "1,000 idle": (1000, lambda _: b""),
        "1,000 in a head": (1000, lambda _: b"GET /livez HTTP/1.1\r\nHost: " + b"a" * 8000),
        "100 slow writers": (100, lambda i: _head(COMPLETION, BODY_BYTES) + (large if i % 4 == 0 else b"{")),
        "100 half-open": (100, lambda _: _head(COMPLETION, 2) + b"{"),
        "100 slow readers": (100, lambda _: _head(COMPLETION, len(much)) + much),
    }


def try_connections(server: EngineServer, name: str, count: int, sent: Callable[[int], bytes]) -> Row:
    def wait() -> float:
        body = {"prompt": "hello", "max_tokens": 1}
        times = []
        for _ in range(20):
            began = time.monotonic()
            answer = httpx.post(server.url + COMPLETION, json=body, timeout=60)
            times.append(time.monotonic() - began if answer.status_code == 200 else 99.0)
        return max(times)

    alone = wait()
    with Prober(server) as prober, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        for index in range(count):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.send(sent(index))
        beside = wait()
    return make_row(name, "longest wait, s", alone, beside, WAIT_BAR_SECONDS, prober, "")


def try_queue(server: EngineServer, name: str, count: int, num_tokens: int) -> Row:
    """As many long prompts as `count`; what the engine does not queue is refused. Then all clients leave."""
    body = json.dumps({"prompt": [5] * num_tokens, "max_tokens": 1}, separators=(",", ":")).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with Prober(server) as prober, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for client in clients:
            client.sendall(_head(COMPLETION, len(body)) + body)
        held = 0
        while len(answered := select.select(clients, [], [], 0)[0]) + held < count:
            time.sleep(0.1)
            load = server.load()
            held = load["running"] + load["waiting"]
        statuses = {client.recv(12).split()[1].decode() for client in answered}
    wait_until(lambda: server.load()["server_load"] == 0, "idle", server)
    status = f"{held} queued, others {','.join(sorted(statuses)) or '-'}"
    return make_row(name, "engine, MiB", 0.0, prober.engine_grown, ENGINE_BAR_MIB, prober, status)


def run(names: list[str], times: int, seconds: float) -> list[Row]:
    rows = []
    chat_model.CONTEXT_TOKENS = CONTEXT_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model.write_chat_model(Path(folder, "model"))
        fields = {"num_kv_blocks": 16_384, "max_num_seqs": 256, "max_num_queued_requests": 256, "num_threads": 1}
        with EngineServer(Path(folder, "server"), model, **fields) as server:
            server.wait_ready()
            for name, attack in bodies().items():
                if not names or name in names:
                    rows.append(try_body(server, name, attack, times, seconds))
                    print_row(rows[-1])
            for name, (count, sent) in connections().items():
                if not names or name in names:
                    rows.append(try_connections(server, name, count, sent))
                    print_row(rows[-1])
            if not names or "long prompts" in names:
                rows.append(try_queue(server, "long prompts", 280, 131_000))
                print_row(rows[-1])
            server.terminate()
            server.wait_exit()
    return rows


def print_row(row: Row) -> None:
    what = f"{row.attack:20} {row.bar}: alone {row.alone:8.2f} beside {row.beside:8.2f}"
    memory = f"memory +{row.memory_mib:4.0f} MiB, {row.engine_mib:3.0f} of it in the engine process"
    rest = f"slowest probe {row.probe_seconds:5.2f} s, {row.status or '-'}"
    print(f"{what}; {memory}; {rest} {'ok' if row.passed else 'MISSED'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which attacks; default: all")
    parser.add_argument("--times", type=int, default=3, help="how often each body is sent")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a stream is read alone")
    parser.add_argument("--watch", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch_streams(arguments.watch)
        return 0
    rows = run(arguments.names, arguments.times, arguments.seconds)
    print(json.dumps([asdict(row) for row in rows]))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
