"""Compiles grammars in a process of its own, one at a time, with limits of processor time, memory and stack.

The process may die at any grammar. `process` then starts another one, which costs a few milliseconds.
"""

import os
import resource
import socket
import threading
from typing import Final, NoReturn

import msgspec
from llguidance import LLTokenizer

from conveyor_engine.limited import limit_cpu_seconds, limit_more_memory, peak_bytes
from conveyor_engine.masks.limits import COMPILE_BYTES, COMPILE_CPU_SECONDS, TOO_LARGE, TRIAL_STACK_BYTES
from conveyor_engine.masks.messages import Result, Try, encode
from conveyor_engine.text.grammar import build_grammar, compile_grammar
from conveyor_engine.wire.frames import read_payloads

_NICENESS = 5  # masks take precedence over new grammars
_RETIRE_BYTES: Final = 32 * 2**20  # a process that has grown by more is replaced
_decoder = msgspec.msgpack.Decoder(Try)


def run_trials(tokenizer: LLTokenizer, connection: socket.socket) -> NoReturn:
    """Run in a forked process until the socket closes. Sends a result first, once it is ready."""
    code = 1
    try:
        os.nice(_NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        threading.stack_size(TRIAL_STACK_BYTES)
        thread = threading.Thread(target=_run, args=(tokenizer, connection))
        thread.start()
        thread.join()
        code = 0
    finally:
        os._exit(code)


def _run(tokenizer: LLTokenizer, connection: socket.socket) -> None:
    first_grammar = build_grammar("json", {"type": "object"}, "").text
    _try(tokenizer, first_grammar)  # so that the first client's grammar does not pay for pages
    first = peak_bytes()
    connection.sendall(encode(Result("", 0, retires=False)))
    with connection.makefile("rb") as stream:
        for order in map(_decoder.decode, read_payloads(stream)):
            before = peak_bytes()
            limit_cpu_seconds(COMPILE_CPU_SECONDS)
            limit_more_memory(COMPILE_BYTES)
            problem = _try(tokenizer, order.grammar)
            after = peak_bytes()
            connection.sendall(encode(Result(problem, after - before, retires=after - first > _RETIRE_BYTES)))


def _try(tokenizer: LLTokenizer, grammar: str) -> str:
    """Compile the grammar and build its first mask. Returns the problem; empty if there is none."""
    matcher = compile_grammar(tokenizer, grammar)
    first = matcher.deep_copy()
    if not matcher.is_error():
        first.compute_bitmask()
    return TOO_LARGE if matcher.is_error() or first.is_error() else ""
