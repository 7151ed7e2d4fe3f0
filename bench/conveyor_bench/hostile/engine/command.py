"""Measures how a hostile client that reaches an engine directly affects the engine's other clients.

It runs a real engine server with a tiny random model whose context is 131,072 tokens, and another whose model reads
images. Another process reads a stream, alone and beside each attack. For some bodies, "alone" is beside a plain body
that causes the same work. Probes use new connections. The figure for memory is the growth of all processes together:
the proportional set sizes of the API process, its fork server and its workers, and the resident set of the engine
process. Exits with 1 if a bar is missed.
The last line is a JSON array with an object for each attack.
"""

import argparse
import contextlib
import json
import select
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.engine import chat_model
from tests.engine.processes import EngineServer, wait_until
from tests.engine.seeing_models import save_seeing_model

from conveyor_bench.hostile.engine.attacks import (
    COMPLETION,
    Attack,
    bodies,
    build_head,
    connections,
    patterns,
    pictures,
)
from conveyor_bench.hostile.engine.prober import Prober
from conveyor_bench.processes import Child
from conveyor_load.percentiles import percentile

CONTEXT_TOKENS = 131_072
GAP_BAR_MS, MEMORY_BAR_MIB, PROBE_BAR_SECONDS, WAIT_BAR_SECONDS = 50.0, 200.0, 1.0, 1.0
PICTURES_BAR_MIB = 512.0  # what reading the images of a request may take (docs/images-in-chats.md)
ENGINE_BAR_MIB = 100.0  # of the engine process: it holds 64 MiB of prompts at most (docs/adr/0056)


@dataclass(frozen=True, slots=True)
class Row:
    attack: str
    bar: str
    alone: float
    beside: float
    memory_mib: float
    engine_mib: float  # the engine process's part of `memory_mib`
    probe_seconds: float
    status: str
    passed: bool


def p99_gap_beside(server: EngineServer, work: Callable[[], Any]) -> tuple[float, Any]:
    with Child("hostile.engine.victim", server.url) as victim:
        victim.read_line()  # it streams
        result = work()
        gaps = json.loads(victim.end())
    return percentile(gaps, 99), result


def try_body(
    server: EngineServer, name: str, attack: Attack, times: int, seconds: float, memory_bar: float = MEMORY_BAR_MIB
) -> Row:
    path, body, compared = attack

    def send(content: bytes) -> str:
        with httpx.Client(timeout=300) as client:
            statuses = {client.post(server.url + path, content=content).status_code for _ in range(times)}
        return ",".join(map(str, sorted(statuses)))

    alone, _ = p99_gap_beside(server, (lambda: send(compared)) if compared else lambda: time.sleep(seconds))
    with Prober(server) as prober:
        beside, status = p99_gap_beside(server, lambda: send(body))
    return make_row(name, "p99 gap, ms", alone, beside, GAP_BAR_MS, prober, status, memory_bar)


def make_row(
    name: str, what: str, alone: float, beside: float, bar: float, prober: Prober, status: str,
    memory_bar: float = MEMORY_BAR_MIB,
) -> Row:  # fmt: skip
    """Return a row of the table. bar: by how much the figure may increase beside the attack."""
    probe_seconds = prober.slowest_seconds
    passed = beside - alone < bar and prober.grown < memory_bar and probe_seconds < PROBE_BAR_SECONDS
    return Row(name, what, alone, beside, prober.grown, prober.engine_grown, probe_seconds, status, passed)


def longest_wait(server: EngineServer) -> float:
    """Return the longest time, in seconds, that one of 20 small requests takes."""
    body = {"prompt": "hello", "max_tokens": 1}
    times = []
    for _ in range(20):
        began = time.monotonic()
        answer = httpx.post(server.url + COMPLETION, json=body, timeout=60)
        times.append(time.monotonic() - began if answer.status_code == 200 else 99.0)
    return max(times)


def try_connections(server: EngineServer, name: str, count: int, sent: Callable[[int], bytes]) -> Row:
    alone = longest_wait(server)
    with Prober(server) as prober, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        for index in range(count):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.send(sent(index))
        beside = longest_wait(server)
    return make_row(name, "longest wait, s", alone, beside, WAIT_BAR_SECONDS, prober, "")


def try_forms(server: EngineServer, name: str, count: int) -> Row:
    """Send `count` bodies at a time, each with a schema that takes a worker its whole CPU time."""
    alone = longest_wait(server)

    def send(number: int) -> int:
        return httpx.post(server.url + COMPLETION, content=patterns(number), timeout=300).status_code

    with Prober(server) as prober, ThreadPoolExecutor(count) as clients:
        answers = [clients.submit(send, number) for number in range(count)]
        time.sleep(0.5)  # all are at the engine
        beside = longest_wait(server)
        statuses = {answer.result() for answer in answers}
    return make_row(name, "longest wait, s", alone, beside, WAIT_BAR_SECONDS, prober, ",".join(map(str, statuses)))


def try_queue(server: EngineServer, name: str, count: int, num_tokens: int) -> Row:
    """Send `count` long prompts. The engine refuses those that it does not queue. Then all clients disconnect."""
    body = json.dumps({"prompt": [5] * num_tokens, "max_tokens": 1}, separators=(",", ":")).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with Prober(server) as prober, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(count)]
        for client in clients:
            client.sendall(build_head(COMPLETION, len(body)) + body)
        held = 0
        while len(answered := select.select(clients, [], [], 0)[0]) + held < count:
            time.sleep(0.1)
            load = server.load()
            held = load["running"] + load["waiting"]
        statuses = {client.recv(12).split()[1].decode() for client in answered}
    wait_until(lambda: server.load()["server_load"] == 0, "idle", server)
    status = f"{held} queued, others {','.join(sorted(statuses)) or '-'}"
    return make_row(name, "engine, MiB", 0.0, prober.engine_grown, ENGINE_BAR_MIB, prober, status)


def try_pictures(folder: Path, names: list[str], times: int, seconds: float) -> list[Row]:
    """Send chats with images to an engine whose model reads them."""
    attacks = {name: attack for name, attack in pictures().items() if not names or name in names}
    rows = list[Row]()
    if not attacks:
        return rows
    save_seeing_model("llava", folder / "seeing")
    with EngineServer(folder / "seeing-server", folder / "seeing", num_threads=1, max_num_seqs=16) as server:
        server.wait_ready()
        for name, attack in attacks.items():
            rows.append(try_body(server, name, attack, times, seconds, PICTURES_BAR_MIB))
            print_row(rows[-1])
        server.terminate()
        server.wait_exit()
    return rows


def run(names: list[str], times: int, seconds: float) -> list[Row]:
    rows = []
    chat_model.CONTEXT_TOKENS = CONTEXT_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model.write_chat_model(Path(folder, "model"))
        sizes: dict[str, Any] = {"num_kv_blocks": 16_384, "max_num_seqs": 256, "max_num_queued_requests": 256}
        with EngineServer(Path(folder, "server"), model, num_threads=1, **sizes) as server:
            server.wait_ready()
            for name, attack in bodies().items():
                if not names or name in names:
                    rows.append(try_body(server, name, attack, times, seconds))
                    print_row(rows[-1])
            for name, (count, sent) in connections().items():
                if not names or name in names:
                    rows.append(try_connections(server, name, count, sent))
                    print_row(rows[-1])
            if not names or "12 costly schemas" in names:
                rows.append(try_forms(server, "12 costly schemas", 12))
                print_row(rows[-1])
            if not names or "long prompts" in names:
                rows.append(try_queue(server, "long prompts", 280, 131_000))
                print_row(rows[-1])
            server.terminate()
            server.wait_exit()
        rows += try_pictures(Path(folder), names, times, seconds)
    return rows


def print_row(row: Row) -> None:
    what = f"{row.attack:20} {row.bar}: alone {row.alone:8.2f} beside {row.beside:8.2f}"
    memory = f"memory +{row.memory_mib:4.0f} MiB, {row.engine_mib:3.0f} of it in the engine process"
    rest = f"slowest probe {row.probe_seconds:5.2f} s, {row.status or '-'}"
    print(f"{what}; {memory}; {rest} {'ok' if row.passed else 'MISSED'}", flush=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench hostile-engine", description=__doc__)
    parser.add_argument("names", nargs="*", help="which attacks; default: all")
    parser.add_argument("--times", type=int, default=3, help="how often each body is sent")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long a stream is read alone")
    arguments = parser.parse_args(argv)
    rows = run(arguments.names, arguments.times, arguments.seconds)
    print(json.dumps([asdict(row) for row in rows]))
    return 0 if all(row.passed for row in rows) else 1
