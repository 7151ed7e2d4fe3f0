"""The walker: it follows all answers in their grammars, token by token, and writes their masks to the `board`.

It may die at any mask. The engine process then starts another one, and opens the answers again. Answers whose masks
are cheap share one lane. An answer that has had a costly mask moves to the other lane, so that it delays only its like.
"""

import os
import resource
import socket
import threading
import time
from collections import OrderedDict
from queue import SimpleQueue
from typing import Final, NamedTuple, NoReturn

from llguidance import LLMatcher, LLTokenizer

from conveyor_engine.limited import limit_more_memory
from conveyor_engine.masks import limits
from conveyor_engine.masks.board import NUM_LANES, Board, Status
from conveyor_engine.masks.messages import (
    Accept,
    Broke,
    Close,
    Compile,
    Compiled,
    FromWalker,
    Open,
    Started,
    ToWalker,
    Wake,
    encode,
    to_walker_decoder,
)
from conveyor_engine.text.grammar import build_grammar, compile_grammar
from conveyor_engine.wire.frames import FrameReader

_QUICK, _SLOW = 0, 1  # lanes
_COSTLY_SECONDS: Final = 0.005  # a mask that moves its answer to the slow lane
_REPLAYED_MAX: Final = 64  # tokens of a new answer that the quick lane accepts
_READ_BYTES: Final = 2**20


class _Answer:
    """The state of one answer."""

    def __init__(self, slot: int, grammar: str) -> None:
        self.slot = slot
        self.grammar = grammar
        self.matcher: LLMatcher | None = None
        self.num_masks = 0
        self.seconds = 0.0  # processor time of its masks
        self.is_costly = False
        self.num_in_slow_lane = 0  # its jobs there; later tokens must not overtake them


class _Job(NamedTuple):
    """Tokens that an answer accepts, and the ticket of the mask after them."""

    answer: _Answer
    ticket: int
    tokens: list[int]


class Walker:
    """Handles the messages in one thread, which is the quick lane. Another thread is the slow lane."""

    def __init__(self, tokenizer: LLTokenizer, board: Board, connection: socket.socket) -> None:
        self._tokenizer = tokenizer
        self._board = board
        self._connection = connection
        self._answers: dict[int, _Answer] = {}  # by slot
        self._compiled: OrderedDict[str, tuple[LLMatcher, int]] = OrderedDict()  # the most recently used last
        self._lock = threading.Lock()  # for sending, and for what both lanes change
        self._costly: SimpleQueue[_Job | Compile] = SimpleQueue()

    def run(self) -> None:
        """Run until the socket closes."""
        self._warm_up()
        self._send(Started(os.getpid()))
        threading.Thread(target=self._run_slow_lane, name="slow-lane", daemon=True).start()
        frames = FrameReader()
        while data := self._connection.recv(_READ_BYTES):
            work: list[_Job] = []
            for payload in frames.feed(data):
                self._handle(to_walker_decoder.decode(payload), work)
            for job in work:
                self._advance(_QUICK, job)

    def _warm_up(self) -> None:
        """Follow a small grammar in this thread, so that the first answer does not pay for new pages of memory."""
        matcher = compile_grammar(self._tokenizer, build_grammar("json", {"type": "object"}, "").text)
        matcher.compute_bitmask()

    def _handle(self, message: ToWalker, work: list[_Job]) -> None:
        match message:
            case Compile():
                self._costly.put(message)
            case Open(slot, ticket, grammar, tokens):
                answer = self._answers[slot] = _Answer(slot, grammar)
                is_slow = len(tokens) > _REPLAYED_MAX or grammar not in self._compiled
                self._queue(_Job(answer, ticket, tokens), work, is_slow=is_slow)
            case Accept(tokens):
                for slot, ticket, token_id in tokens:
                    if (known := self._answers.get(slot)) is not None:
                        self._queue(_Job(known, ticket, [token_id]), work, is_slow=known.is_costly)
            case Close(slot):
                self._answers.pop(slot, None)

    def _queue(self, job: _Job, work: list[_Job], *, is_slow: bool) -> None:
        """Append the job to `work`; to the slow lane if it is slow, or if the answer has jobs there."""
        with self._lock:
            is_slow = is_slow or job.answer.num_in_slow_lane > 0
            job.answer.num_in_slow_lane += is_slow
        if is_slow:
            self._costly.put(job)
        else:
            work.append(job)

    def _run_slow_lane(self) -> None:
        self._warm_up()
        while True:
            job = self._costly.get()
            if isinstance(job, Compile):
                self._board.begin_work(_SLOW, job.number)
                self._compile(job.grammar, job.num_bytes)
                self._board.begin_work(_SLOW, 0)
                self._send(Compiled(job.number))
            else:
                self._advance(_SLOW, job)
                with self._lock:
                    job.answer.num_in_slow_lane -= 1

    def _compile(self, grammar: str, num_bytes: int) -> LLMatcher:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar][0]
        matcher = compile_grammar(self._tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = matcher, num_bytes
            while len(self._compiled) > 1 and self._is_full():
                self._compiled.popitem(last=False)
        return matcher

    def _is_full(self) -> bool:
        num_bytes = sum(num_bytes for _, num_bytes in self._compiled.values())
        return len(self._compiled) > limits.CACHED or num_bytes > limits.CACHED_BYTES

    def _advance(self, lane: int, job: _Job) -> None:
        """Append the tokens to the answer, build its mask, and publish the result."""
        answer, ticket, tokens = job
        if self._answers.get(answer.slot) is not answer:
            return  # closed meanwhile
        self._board.begin_work(lane, ticket)
        if answer.matcher is None:
            answer.matcher = self._compile(answer.grammar, 0).deep_copy()
        matcher, began = answer.matcher, time.thread_time()
        if tokens:
            matcher.consume_tokens(tokens)
        is_complete = matcher.is_stopped() and not matcher.is_error()
        mask = b"" if is_complete else matcher.compute_bitmask()[: self._board.mask_bytes]
        seconds = time.thread_time() - began
        self._board.begin_work(lane, 0)
        self._publish(job, Status.COMPLETE if is_complete else Status.MASK, mask, seconds)

    def _publish(self, job: _Job, status: Status, mask: bytes, seconds: float) -> None:
        answer, ticket, tokens = job
        assert answer.matcher is not None
        counts = answer.num_masks > 0  # the first mask has been tried or paid for, and touches new pages of memory
        if counts:
            answer.is_costly = answer.is_costly or seconds > _COSTLY_SECONDS
            answer.seconds += seconds
        answer.num_masks += max(1, len(tokens))
        with self._lock:
            if self._answers.get(answer.slot) is not answer:
                return
            if answer.matcher.is_error():
                self._send_locked(Broke(answer.slot, ticket, limits.TOO_LARGE, False))
            elif counts and self._is_over_budget(answer, seconds):
                self._send_locked(Broke(answer.slot, ticket, limits.TOO_COSTLY_TO_FOLLOW, True))
            else:
                self._board.write(answer.slot, ticket, status, mask.ljust(self._board.mask_bytes, b"\0"))
                if self._board.loop_sleeps:
                    self._board.loop_sleeps = False
                    self._send_locked(Wake())

    def _is_over_budget(self, answer: _Answer, seconds: float) -> bool:
        allowed = limits.MASK_CPU_SECONDS + limits.MASKS_CPU_SECONDS * answer.num_masks
        return seconds > limits.MASK_CPU_SECONDS or answer.seconds > allowed

    def _send(self, message: FromWalker) -> None:
        with self._lock:
            self._send_locked(message)

    def _send_locked(self, message: FromWalker) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError:
            os._exit(0)  # the engine process has ended or has closed the socket


def run_walker(tokenizer: LLTokenizer, board: Board, connection: socket.socket) -> NoReturn:
    """Run in a forked process until the socket closes."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_more_memory(limits.WALKER_BYTES + NUM_LANES * limits.WALKER_STACK_BYTES)
        threading.stack_size(limits.WALKER_STACK_BYTES)
        thread = threading.Thread(target=Walker(tokenizer, board, connection).run, name="quick-lane")
        thread.start()
        thread.join()
        code = 0
    finally:
        os._exit(code)
