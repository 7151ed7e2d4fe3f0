"""The queue of outputs of one HTTP request, for all of its prompts and choices.

`EngineClient` opens it and puts outputs in; `tasks.generate` and `http.one_step` read it. Each request id gets at most
one output with a finish reason. The reader gets the last output of every request that it does not abort, or one error.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from typing import Self

import msgspec

from conveyor_engine.serving.bill import Bill
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_engine.wire.worker import Part

_BATCH_TOKENS = 64  # a reader gets about this many tokens in one turn, and needs a few milliseconds for them


class ReadTurns:
    """Lets readers with a backlog continue in turn: one reader in each iteration of the event loop.

    If all readers continued at once, new connections and probes would wait too long for the event loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._wake_next)
        await turn

    def _wake_next(self) -> None:
        turn = self._waiting.popleft()
        while turn.done() and self._waiting:  # skip readers whose clients have disconnected
            turn = self._waiting.popleft()
        if not turn.done():
            turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._wake_next)


class Generation:
    """The queue. Use it in `async with`; leaving the block aborts requests that still run."""

    def __init__(
        self,
        request_ids: list[str],
        timeout_seconds: float,
        abort: Callable[[list[str]], None],
        turns: ReadTurns,
        follow: Callable[[RequestOutput], Part | None] = lambda _: None,
        adapter: int = 0,
    ) -> None:
        """After the timeout, open requests end with DEADLINE. abort: ends the requests with these ids in the engine.

        follow: called with each output before it is read. For a request's last output, it returns the part that
        continues the request, or None. adapter: of all parts.
        """
        self.follow, self.adapter = follow, adapter
        self.request_ids = request_ids
        self.turns = turns
        self._abort = abort
        self._open = set(request_ids)
        self.unsent: deque[Part] = deque()  # parts that wait until the engine has room for them
        self.bill = Bill()
        self.num_at_engine = 0  # requests that were sent to the engine and have not ended
        self._outputs: deque[RequestOutput] = deque()
        self.on_held: Callable[[int], None] = lambda _: None  # called with each change in the bytes held here
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None  # the reader that waits for outputs
        self.opened_at = time.monotonic()  # when its first parts are sent to the engine
        self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout_seconds), self._expire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        self._open.clear()
        self._abort(self.request_ids)

    async def batches(self) -> AsyncIterator[list[RequestOutput]]:
        """Yield the outputs, a few tokens at a time, until every request has had its last output or is aborted.

        A batch has the outputs of each request merged into one, so that a reader with a backlog catches up. A failed
        output begins a new batch, so that the reader shows earlier outputs before the failure. Raises the error of
        `fail` (Overloaded, InvalidRequest, Unavailable, EngineDead) after the earlier outputs.
        """
        while self._open or self._outputs:
            if self._outputs:
                yield self._next_batch()
                if self._outputs:
                    await self.turns.wait()
            elif self._error is not None:
                raise self._error
            else:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader

    def add_part(self, part: Part) -> None:
        """Add a part whose requests continue a request of this queue."""
        self.request_ids += part.num_tokens_of
        self._open.update(part.num_tokens_of)
        self.unsent.append(part)
        self.on_held(len(part.add))

    def take_part(self) -> None:
        """Remove the next part from `unsent`, because it is sent to the engine."""
        part = self.unsent.popleft()
        self.num_at_engine += len(part.num_tokens_of)
        self.on_held(-len(part.add))

    def drop_parts(self, request_ids: Collection[str]) -> list[str]:
        """Drop unsent parts whose requests are all among `request_ids`. Returns the requests of the dropped parts."""
        ending = set(request_ids)
        dropped = [part for part in self.unsent if ending.issuperset(part.num_tokens_of)]
        if dropped:
            self.unsent = deque(part for part in self.unsent if not ending.issuperset(part.num_tokens_of))
            self.on_held(-sum(len(part.add) for part in dropped))
        return [request_id for part in dropped for request_id in part.num_tokens_of]

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _next_batch(self) -> list[RequestOutput]:
        batch: dict[str, RequestOutput] = {}
        num_tokens = num_bytes = 0
        while self._outputs and num_tokens < _BATCH_TOKENS:
            if batch and self._outputs[0].has_failed:
                break
            output = self._outputs.popleft()
            num_tokens += max(1, len(output.new_token_ids)) * _weight(output)
            num_bytes += _held_bytes(output)
            if output.request_id in batch:
                batch[output.request_id].extend(output)
            else:
                batch[output.request_id] = output
        self.on_held(-num_bytes)
        return list(batch.values())

    def put(self, output: RequestOutput) -> None:
        """Queue an output. Outputs after a request's last one are ignored."""
        if output.request_id not in self._open or self._error is not None:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
            self.num_at_engine -= 1
        for piece in _split(output):
            self._outputs.append(piece)
            self.on_held(_held_bytes(piece))
        self._wake()

    def abort(self, request_ids: list[str]) -> None:
        """Abort these requests and drop their queued outputs."""
        self._open.difference_update(request_ids)
        self.on_held(-sum(_held_bytes(output) for output in self._outputs if output.request_id in request_ids))
        self._outputs = deque(output for output in self._outputs if output.request_id not in request_ids)
        self._abort(request_ids)

    def fail(self, error: Exception) -> None:
        """End all open requests with this error. The reader gets the queued outputs before the error."""
        if self._open and self._error is None:
            self._error = error
            self._wake()

    def _expire(self) -> None:
        for request_id in list(self._open):
            self.put(RequestOutput(request_id=request_id, finish_reason=FinishReason.DEADLINE))
        self._abort(self.request_ids)


def _split(output: RequestOutput) -> list[RequestOutput]:
    """Split an output into outputs of at most a batch's size, the last of which has the finish reason.

    This is necessary because static batching returns whole answers.
    """
    ids, logprobs = output.new_token_ids, output.logprobs
    if len(ids) <= 1:
        return [output]
    size = max(1, _BATCH_TOKENS // _weight(output))
    parts = []
    for start in range(0, len(ids), size):
        end = start + size
        part = msgspec.structs.replace(output, new_token_ids=ids[start:end], finish_reason=None, message=None)
        part.logprobs = None if logprobs is None else logprobs[start:end]
        parts.append(part)
    parts[-1].finish_reason, parts[-1].message = output.finish_reason, output.message
    return parts


def _weight(output: RequestOutput) -> int:
    """Return the work for each token of the output: one unit for the token and one for each alternative."""
    return 1 + len(output.logprobs[0].packed_ids) // 4 if output.logprobs else 1


def _held_bytes(output: RequestOutput) -> int:
    """Return roughly how much memory the output takes."""
    num_logprobs = len(output.logprobs or ()) + len(output.prompt_logprobs or ())
    return 200 + 40 * len(output.new_token_ids) + 500 * num_logprobs + len(output.payload or b"")
