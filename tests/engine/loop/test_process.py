"""The loop of the engine's process, with a pretended core, at one end of a socket pair."""

import re
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any, cast

import msgspec
import pytest
from tests.engine.builders import make_request
from tests.engine.processes import environment

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.process import Channel, Disconnected, EngineLoop, Pulse
from conveyor_engine.wire.messages import Abort, Add, Start, encode_frame
from conveyor_engine.wire.request import EngineRequest, EngineStats, RequestOutput


class SlowCore:
    """Always in a step; `step` begins when one does."""

    def __init__(self) -> None:
        self.stepping = threading.Event()
        self.num_steps = 0
        self.added: list[str] = []
        self.arrival_times: list[float] = []
        self.aborted_at: dict[str, int] = {}  # request id -> steps begun before

    def add_request(self, request: EngineRequest) -> None:
        self.added.append(request.request_id)
        self.arrival_times.append(request.arrival_time)

    def abort(self, request_id: str) -> None:
        self.aborted_at[request_id] = self.num_steps

    def has_unfinished(self) -> bool:
        return bool(self.added)

    def next_wakeup(self, now: float) -> float:
        return now

    def step(self, now: float) -> list[RequestOutput]:
        self.num_steps += 1
        self.stepping.set()
        time.sleep(0.2)
        return []

    def stats(self) -> EngineStats:
        return EngineStats()


def run_loop(core: Any, connection: socket.socket) -> None:
    """Until the other end is closed, or what the loop raises."""
    with connection:
        channel = Channel(connection)
        EngineLoop(cast(EngineCore, core), channel, cast(Pulse, nullcontext())).run()


def test_an_abort_behind_many_long_prompts_waits_for_no_more_than_two_steps() -> None:
    core, (ours, theirs) = SlowCore(), socket.socketpair()
    long_prompts = b"".join(encode_frame(Add.of([make_request(f"{n}", 60_000)])) for n in range(20))
    steps_when_sent = []

    def send() -> None:
        with ours:
            ours.sendall(encode_frame(Add.of([make_request("first")])))
            core.stepping.wait()
            steps_when_sent.append(core.num_steps)
            ours.sendall(long_prompts + encode_frame(Abort(["first"])))
            ours.shutdown(socket.SHUT_WR)
            while ours.recv(1 << 16):
                pass

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Disconnected):
        run_loop(core, theirs)
    sender.join()
    assert len(core.added) == 21
    assert core.aborted_at["first"] - steps_when_sent[0] < 3


def test_a_request_arrives_when_the_engine_has_it_not_when_its_first_byte_came() -> None:
    """So that a batch waits its window for company that can run, not for bodies and tokenizers."""
    core, (ours, theirs) = SlowCore(), socket.socketpair()
    began = time.monotonic()
    with ours:
        ours.sendall(encode_frame(Add.of([make_request("a", arrival_time=began - 100)])))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(Disconnected):
            run_loop(core, theirs)
    assert core.arrival_times[0] >= began


def test_a_message_that_cannot_be_read_ends_the_loop_after_those_before_it() -> None:
    core, (ours, theirs) = SlowCore(), socket.socketpair()
    with ours:
        ours.sendall(encode_frame(Abort(["a"])) + struct.pack("!I", 1) + b"\xc1")
        with pytest.raises(msgspec.MsgspecError):
            run_loop(core, theirs)
    assert core.aborted_at == {"a": 0}


BROKEN = """
import runpy, sys, types, warnings
def broken(*_, **__):
    warnings.warn("odd\\nand odder")
    raise RuntimeError("two\\nlines")
sys.modules["conveyor_engine.execution.model_runner"] = types.SimpleNamespace(ModelRunner=broken)
runpy.run_module("conveyor_engine.loop.process", run_name="__main__", alter_sys=True)
"""


def test_a_core_that_fails_is_one_line_of_the_log() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(Start(EngineConfig(model="none"))))
        ended = subprocess.run(
            [sys.executable, "-c", BROKEN, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env=environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert all(re.match(r"time=\S+ level=\S+ event=", line) for line in lines), ended.stderr
    assert len(lines) == 2
    assert 'level=ERROR event=engine_failed traceback="Traceback' in lines[1]
