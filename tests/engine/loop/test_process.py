"""Tests the loop of the engine's process, with a fake core, at one end of a socket pair."""

import re
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.engine.builders import make_request
from tests.engine.processes import environment

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.process import Channel, Disconnected, EngineLoop, Pulse
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.messages import Abort, Add, Failed, FromEngine, LoadModel, ToEngine, from_engine_decoder
from conveyor_engine.wire.request import EngineRequest, EngineStats, RequestOutput
from conveyor_protocol.failure_reasons import FailureReason


class Core:
    """A fake core. A step ends all requests that were added, when the test allows it."""

    def __init__(self) -> None:
        self.stepping = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()
        self.grammars = None
        self.adapters = SimpleNamespace(is_due=False, advance=lambda now: [])
        self.num_open = 0
        self.history: list[str] = []  # the ids that were added, "abort" before an id, and steps
        self.arrival_times: list[float] = []

    def add_request(self, request: EngineRequest) -> None:
        self.num_open += 1
        self.history.append(request.request_id)
        self.arrival_times.append(request.arrival_time)

    def abort(self, request_id: str) -> None:
        self.history.append(f"abort {request_id}")

    def next_wakeup(self, now: float) -> float | None:
        return now if self.num_open else None

    def step(self, now: float) -> list[RequestOutput]:
        self.stepping.set()
        assert self.may_end.wait(60)
        self.history.append("step")
        self.num_open = 0
        return []

    def stats(self) -> EngineStats:
        return EngineStats()


class Arrived:
    """A channel all of whose messages have arrived when a step ends."""

    def __init__(self, *batches: list[ToEngine]) -> None:
        self._batches = iter(batches)

    def receive(self, timeout_seconds: float | None) -> list[ToEngine]:
        try:
            return next(self._batches)
        except StopIteration:
            raise Disconnected from None

    def send(self, message: FromEngine) -> None:
        pass


def run_loop(core: Core, channel: Any) -> None:
    """Run the loop until the other end is closed. Raises the loop's error."""
    EngineLoop(cast(EngineCore, core), channel, cast(Pulse, nullcontext())).run()


def test_all_that_has_arrived_is_taken_before_the_next_step() -> None:
    core = Core()
    later = [Add.of([make_request(f"{n}")]) for n in range(3)]
    with pytest.raises(Disconnected):
        run_loop(core, Arrived([Add.of([make_request("first")])], [*later, Abort(["first"])]))
    assert core.history == ["first", "step", "0", "1", "2", "abort first", "step"]


def test_messages_are_read_while_a_step_runs() -> None:
    """So an abort behind many long prompts waits only for the step. The prompts are larger than the socket's buffer."""
    core, (ours, theirs) = Core(), socket.socketpair()
    core.may_end.clear()
    long_prompts = b"".join(encode_frame(Add.of([make_request(f"{n}", 60_000)])) for n in range(20))

    def send() -> None:
        ours.sendall(encode_frame(Add.of([make_request("first")])))
        core.stepping.wait()
        ours.sendall(long_prompts + encode_frame(Abort(["first"])))
        ours.shutdown(socket.SHUT_WR)
        core.may_end.set()

    with ours, theirs, ThreadPoolExecutor() as pool:
        sending = pool.submit(send)
        with pytest.raises(Disconnected):
            run_loop(core, Channel(theirs))
        sending.result()
    assert core.history[:2] == ["first", "step"]
    assert "abort first" in core.history


def test_a_request_arrives_when_the_engine_has_it_not_when_its_first_byte_came() -> None:
    """So a batch's window is time for other requests that can run, not for reading and tokenizing bodies."""
    core, (ours, theirs) = Core(), socket.socketpair()
    began = time.monotonic()
    with ours, theirs:
        ours.sendall(encode_frame(Add.of([make_request("a", arrival_time=began - 100)])))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(Disconnected):
            run_loop(core, Channel(theirs))
    assert core.arrival_times[0] >= began


def test_a_message_that_cannot_be_read_ends_the_loop_after_those_before_it() -> None:
    core, (ours, theirs) = Core(), socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(Abort(["a"])) + struct.pack("!I", 1) + b"\xc1")
        with pytest.raises(msgspec.MsgspecError):
            run_loop(core, Channel(theirs))
    assert core.history == ["abort a"]


FROZEN = """
import gc
from conveyor_engine.loop import process
from tests.engine import idle_engine as idle
loaded = []
def load(config, channel):
    loaded.append(idle.load(config, channel))
    return loaded[0]
def run(loop):
    print(any(known is loaded[0] for known in gc.get_objects()))
    raise process.Disconnected
process.EngineLoop.run = run
process.main(load)
"""


def test_what_was_loaded_is_not_looked_at_again() -> None:
    """Otherwise a full garbage collection delays a step while it visits the objects of torch and the model."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(LoadModel(EngineConfig(model="none", num_kv_blocks=1024))))
        ended = subprocess.run(
            [sys.executable, "-c", FROZEN, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env=environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert ended.stdout == "False\n", ended.stderr


BROKEN = """
import runpy, sys, types, warnings
def broken(*_, **__):
    warnings.warn("odd\\nand odder")
    raise ERROR
sys.modules["conveyor_engine.execution.build"] = types.SimpleNamespace(build_runner=broken)
runpy.run_module("conveyor_engine.loop.process", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (r'RuntimeError("two\nlines\ud800")', Failed(FailureReason.ENGINE_ERROR, "RuntimeError: two lines")),
        (
            'type("OutOfMemoryError", (RuntimeError,), {})("device 0")',
            Failed(FailureReason.OUT_OF_MEMORY, "OutOfMemoryError: device 0"),
        ),
    ],
)
def test_a_core_that_fails_is_one_line_of_the_log(error: str, failed: Failed) -> None:
    program = BROKEN.replace("ERROR", error)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(LoadModel(EngineConfig(model="none"))))
        ended = subprocess.run(
            [sys.executable, "-c", program, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env=environment(), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        theirs.close()
        *_, last = map(from_engine_decoder.decode, FrameReader().feed(ours.makefile("rb").read()))
    lines = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert all(re.match(r"time=\S+ level=\S+ event=", line) for line in lines), ended.stderr
    assert len(lines) == 2
    assert 'level=ERROR event=engine_failed traceback="Traceback' in lines[1]
    assert last == failed
