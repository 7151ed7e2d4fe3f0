"""The outputs of one HTTP request's prompts and choices, from the engine's side of asyncio to its reader.

Opened by `EngineClient`, which puts outputs in; read by `http.generated` and `http.embeddings`. Invariant: each request
id gets at most one output with a finish reason, and the reader sees the end of all of them or one error, never both and
never neither.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

import msgspec

from conveyor_engine.wire.request import FinishReason, RequestOutput

_BATCH_TOKENS = 64  # that a reader gets at once: a few milliseconds of work, then it is other streams' turn


class Turns:
    """Of the readers that are behind, one goes on in each turn of the event loop, in their order.

    Together they would hold it up for as long as all their batches take, and new connections and probes with it.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Returns when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        turn = self._waiting.popleft()
        while turn.done() and self._waiting:  # its client has left
            turn = self._waiting.popleft()
        if not turn.done():
            turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give)


class Generation:
    """Use it in `async with`: leaving aborts what still runs."""

    def __init__(
        self, request_ids: list[str], timeout_seconds: float, abort: Callable[[list[str]], None], turns: Turns
    ) -> None:
        """After the timeout all that is open ends with DEADLINE, whatever the engine does. `abort` tells the engine."""
        self.request_ids = request_ids
        self.turns = turns
        self._abort = abort
        self._open = set(request_ids)
        self._outputs: deque[RequestOutput] = deque()
        self.on_held: Callable[[int], None] = lambda _: None  # told how many bytes more, or less, wait for the reader
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout_seconds), self._expire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._open.clear()
        self._abort(self.request_ids)

    async def batches(self) -> AsyncIterator[list[RequestOutput]]:
        """The outputs that are there, a few tokens at a time, until every request has had its last one.

        Raises what `fail` was given (Overloaded, InvalidRequest, Unavailable, EngineDead), after the outputs before it.
        """
        while self._open or self._outputs or self._error:
            if self._outputs:
                yield self._next_batch()
                if self._outputs:
                    await self.turns.take()
            elif self._error is not None:
                raise self._error
            else:
                await self._news.wait()
                self._news.clear()

    def _next_batch(self) -> list[RequestOutput]:
        batch, num_tokens, num_bytes = [], 0, 0
        while self._outputs and num_tokens < _BATCH_TOKENS:
            output = self._outputs.popleft()
            batch.append(output)
            num_tokens += max(1, len(output.new_token_ids)) * _weight(output)
            num_bytes += _held_bytes(output)
        self.on_held(-num_bytes)
        return batch

    def put(self, output: RequestOutput) -> None:
        """Takes an output in; none after a request's last."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        for part in _split(output):
            self._outputs.append(part)
            self.on_held(_held_bytes(part))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends all that is open with this error."""
        if self._open:
            self._open.clear()
            self._error = error
            self._news.set()

    def _expire(self) -> None:
        for request_id in list(self._open):
            self.put(RequestOutput(request_id=request_id, finish_reason=FinishReason.DEADLINE))
        self._abort(self.request_ids)


def _split(output: RequestOutput) -> Iterator[RequestOutput]:
    """The same in parts of a batch's size; the last one ends it. Static batching gives whole answers at once."""
    ids, logprobs = output.new_token_ids, output.logprobs
    size = max(1, _BATCH_TOKENS // _weight(output))
    last_start = max(0, (len(ids) - 1) // size * size)
    for start in range(0, last_start, size):
        end = start + size
        part_logprobs = None if logprobs is None else logprobs[start:end]
        yield msgspec.structs.replace(
            output, new_token_ids=ids[start:end], logprobs=part_logprobs, finish_reason=None, message=None
        )
    if last_start:
        rest = None if logprobs is None else logprobs[last_start:]
        output = msgspec.structs.replace(output, new_token_ids=ids[last_start:], logprobs=rest)
    yield output


def _weight(output: RequestOutput) -> int:
    """Of a token, in work: each alternative is shown as a token is."""
    return 1 + len(output.logprobs[0].packed_ids) // 4 if output.logprobs else 1


def _held_bytes(output: RequestOutput) -> int:
    """About as much as it takes in memory."""
    return 200 + 40 * len(output.new_token_ids) + 500 * len(output.logprobs or ()) + len(output.vector or b"")
