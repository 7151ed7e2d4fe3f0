"""The engine process: the loop around EngineCore. `serving.engine_process` starts it and has the socket's other end.

The loop takes all new messages, runs a step, and sends the step's outputs. The loop has its own process, so the API
process never waits for a forward pass. The loop ends when the socket is closed. One thread always reads the socket,
also during a step. So an abort that arrives during a step takes effect before the next step. Another thread sends
heartbeats with the current step's duration so far.
"""

import argparse
import contextlib
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ErrorCode, InvalidRequest, Overloaded, StartError, explain_crash
from conveyor_engine.logs import configure_logging
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Executor
from conveyor_engine.masks.client import Masks
from conveyor_engine.masks.grammars import Grammars
from conveyor_engine.masks.verdicts import key_of
from conveyor_engine.registry import find_task, load_about
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.frames import encode_frame, read_payloads
from conveyor_engine.wire.messages import (
    Abort,
    Add,
    Failed,
    FromEngine,
    Heartbeat,
    LoadAdapter,
    LoadingLine,
    LoadModel,
    Ready,
    Refused,
    StartFailed,
    StepOutputs,
    ToEngine,
    UnloadAdapter,
    to_engine_decoder,
)
from conveyor_engine.wire.request import EngineRequest
from conveyor_protocol.failure_reasons import FailureReason

HEARTBEAT_SECONDS = 1.0
_log = logging.getLogger("conveyor_engine.loop.process")


class Disconnected(Exception):
    """The API process has ended, so the engine process ends too."""


class Channel:
    """The socket to the API process. Several threads may send; only the loop receives.

    The API process limits the messages that have arrived but are not received yet (`EngineClient.open_generation`).
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._arrived: SimpleQueue[ToEngine | Exception | None] = SimpleQueue()  # ends with an exception
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        frame = encode_frame(message)
        try:
            with self._sending:
                self._connection.sendall(frame)
        except OSError as error:
            raise Disconnected from error

    def wake(self) -> None:
        """Let `receive` yield None."""
        self._arrived.put(None)

    def receive(self, timeout_seconds: float | None) -> Iterator[ToEngine | None]:
        """Yield all messages that have arrived. Waits for the first one, up to the timeout (None: without a limit).

        Raises Disconnected after the last message, or the decoder's exception.
        """
        try:
            message = self._arrived.get(timeout=timeout_seconds)
            while True:
                if isinstance(message, Exception):
                    raise message
                yield message
                message = self._arrived.get_nowait()
        except Empty:
            return

    def _read(self) -> None:
        try:
            for message in self._messages():
                self._arrived.put(message)
        except OSError:
            pass  # a connection reset is a normal end too
        except Exception as error:  # the loop raises it
            self._arrived.put(error)
        self._arrived.put(Disconnected())

    def _messages(self) -> Iterator[ToEngine]:
        with self._connection.makefile("rb") as stream:
            yield from map(to_engine_decoder.decode, read_payloads(stream))


class EngineLoop:
    """Receives messages, runs steps and sends outputs until the API process has closed the socket."""

    def __init__(self, core: EngineCore, channel: Channel, pulse: "Pulse") -> None:
        self._core = core
        self._channel = channel
        self._pulse = pulse
        self._grammars = core.grammars
        # Requests whose grammars are not compiled yet, in order of arrival, with the keys of the grammars.
        self._held: list[tuple[bytes, Add]] = []
        self._aborted = set[str]()  # those of them that have been aborted
        self._num_added = 0

    def run(self) -> None:
        """Run until Disconnected or an exception of the core is raised."""
        while True:
            for message in self._channel.receive(self._wait_seconds(time.monotonic())):
                self._handle(message)
            with self._pulse:
                results = self._core.adapters.advance(time.monotonic())
            for result in results:
                self._channel.send(result)
            now = time.monotonic()
            if self._next_step_seconds(now) == 0.0:
                with self._pulse:
                    outputs = self._core.step(now)
                self._channel.send(StepOutputs(outputs, self._core.stats(), self._num_added))

    def _wait_seconds(self, now: float) -> float | None:
        """Return how many seconds to wait for messages: 0 if a step or an adapter is due, None if none will be."""
        return 0.0 if self._core.adapters.is_due else self._next_step_seconds(now)

    def _next_step_seconds(self, now: float) -> float | None:
        wakeup = self._core.next_wakeup(now)
        return None if wakeup is None else max(0.0, wakeup - now)

    def _handle(self, message: ToEngine | None) -> None:
        match message:
            case None:
                self._core.notice_masks()
                self._add_held()
            case Add() if message.grammar and self._grammars is not None:
                self._held.append((key_of(message.grammar), message))
                self._add_held()
            case Add():
                self._add(message.requests(time.monotonic()))
            case LoadAdapter():
                self._core.adapters.load(message)
            case UnloadAdapter(number):
                self._core.adapters.unload(number)
            case Abort(request_ids):
                for request_id in request_ids:
                    self._core.abort(request_id)
                self._abort_held(set(request_ids))
            case _:
                self._core.drain()

    def _add_held(self) -> None:
        """Add the requests whose grammars are compiled. The others keep waiting."""
        if self._grammars is None:
            return
        held, self._held = self._held, []
        for key, message in held:
            verdict = self._grammars.judge(key, message.grammar)
            if verdict is None:
                self._held.append((key, message))
                continue
            if verdict.problem:
                code = ErrorCode.FORM_TOO_COSTLY if verdict.is_too_costly else ErrorCode.INVALID_VALUE
                error = InvalidRequest(f"structured output cannot be followed: {verdict.problem}", code=code)
                self._refuse(message.request_ids, error)
            else:
                self._add(message.requests(time.monotonic()))
                for request_id in self._aborted.intersection(message.request_ids):
                    self._core.abort(request_id)
            self._aborted.difference_update(message.request_ids)

    def _abort_held(self, request_ids: set[str]) -> None:
        """Refuse the waiting requests of a message once all of them are aborted."""
        if not self._held:
            return
        assert self._grammars is not None
        held, self._held = self._held, []
        for key, message in held:
            self._aborted |= request_ids.intersection(message.request_ids)
            if self._aborted.issuperset(message.request_ids):
                self._aborted.difference_update(message.request_ids)
                self._refuse(message.request_ids, InvalidRequest("the request was aborted"))
            else:
                self._held.append((key, message))
        for key in {key for key, _ in held} - {key for key, _ in self._held}:
            self._grammars.cancel(key)

    def _add(self, requests: list[EngineRequest]) -> None:
        """Add all requests, or none if one is rejected: those already added are aborted before the next step."""
        for index, request in enumerate(requests):
            try:
                self._core.add_request(request)
            except (Overloaded, InvalidRequest) as error:
                for added in requests[:index]:
                    self._core.abort(added.request_id)
                self._refuse([each.request_id for each in requests], error)
                return
        self._num_added += len(requests)

    def _refuse(self, request_ids: list[str], error: Overloaded | InvalidRequest) -> None:
        self._channel.send(Refused(request_ids, str(error), isinstance(error, Overloaded), error.param, error.code))


class Pulse:
    """Sends heartbeats from a thread. The loop enters and leaves it around each step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._step_began: float | None = None
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def __enter__(self) -> None:
        self._step_began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._step_began = None

    def _beat(self) -> None:
        while True:
            began = self._step_began
            try:
                self._channel.send(Heartbeat(0.0 if began is None else time.monotonic() - began))
            except Disconnected:
                os._exit(0)  # also during loading or a step, because nobody needs the result any more
            time.sleep(HEARTBEAT_SECONDS)


Load = Callable[[EngineConfig, Channel], EngineCore]


def run(channel: Channel, load: Load) -> int:
    """Run the process from its first message on, and return its exit code."""
    try:
        start = next(channel.receive(None))
        assert isinstance(start, LoadModel)
        pulse = Pulse(channel)
        core = load(start.config, channel)
        gc.freeze()  # the garbage collector would otherwise scan all loaded objects, which delays a step by 0.2 s
        channel.send(Ready(core.facts, core.longest_warmup_step_seconds, core.warmup_seconds))
        EngineLoop(core, channel, pulse).run()
    except Disconnected:
        return 0
    except StartError as error:
        last_words: FromEngine = StartFailed(error.reason, str(error))
    except Exception as error:  # any other exception ends the process
        _log.exception("event=engine_failed")
        last_words = Failed(*explain_crash(error))
    with contextlib.suppress(Disconnected):
        channel.send(last_words)
    return 1


def _load(config: EngineConfig, channel: Channel) -> EngineCore:
    """Load the model and build the engine.

    In mode Static this process sends no tokens until the whole batch is done, so the API process would find stop
    strings too late. Therefore this process gets a tokenizer and finds them itself. The next step is planned while a
    step runs, but only on GPUs: on a CPU that gains nothing (ADR 14). The garbage collector is off during imports,
    which makes them an eighth faster.
    """
    gc.disable()
    from conveyor_engine.execution.build import build_runner

    gc.enable()
    directory = Path(config.model)
    reads_text = load_about(find_task(config.task, directory)).reads_text
    tokenizer = Tokenizer(directory) if reads_text and config.batching_mode == "static" else None

    def progress(line: str) -> None:
        channel.send(LoadingLine(line))

    def fail(reason: FailureReason, message: str) -> None:
        with contextlib.suppress(Disconnected):
            channel.send(Failed(reason, message))
        os._exit(1)

    runner: Executor = build_runner(config, progress, fail)
    facts = runner.facts
    masks = Masks(directory / "tokenizer.json", facts.vocab_size, facts.eos_token_ids, facts.max_num_seqs, channel.wake)
    grammars = Grammars(masks, facts.vocab_size, facts.eos_token_ids)
    overlap = facts.device != "cpu"
    return EngineCore(config, runner, progress, tokenizer, overlap=overlap, grammars=grammars, wake=channel.wake)


def main(load: Load = _load) -> int:
    """Run the engine process and return its exit code.

    `load`: builds the engine; measurements pass another function.
    """
    parser = argparse.ArgumentParser(prog="python -m conveyor_engine.loop.process", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    configure_logging()
    logging.captureWarnings(True)
    return run(Channel(socket.socket(fileno=parser.parse_args().fd)), load)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # all messages are sent, and an orderly exit of torch and the model would only take time
