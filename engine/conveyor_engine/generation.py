"""The outputs of one HTTP request's prompts and choices, from the engine's side of asyncio to its reader.

Opened by `AsyncEngine`, which puts outputs in; read by `api/generated`. Invariant: each request id gets at most one
output with a finish reason, and the reader sees the end of all of them or one error, never both and never neither.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Self

from conveyor_engine.request import FinishReason, RequestOutput


class Generation:
    """Use it in `async with`: leaving aborts what still runs."""

    def __init__(self, request_ids: list[str], timeout_seconds: float, abort: Callable[[list[str]], None]) -> None:
        """After the timeout all that is open ends with DEADLINE, whatever the engine does. `abort` tells the engine."""
        self.request_ids = request_ids
        self._abort = abort
        self._open = set(request_ids)
        self._outputs: list[RequestOutput] = []
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
        """All outputs that are there, again and again, until every request has had its last one.

        Raises what `fail` was given (Overloaded, InvalidRequest, Unavailable, EngineDead), after the outputs before it.
        """
        while self._open or self._outputs or self._error:
            await self._news.wait()
            self._news.clear()
            outputs, self._outputs = self._outputs, []
            if outputs:
                yield outputs
            if self._error is not None:
                raise self._error

    def put(self, output: RequestOutput) -> None:
        """Takes an output in; none after a request's last."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        self._outputs.append(output)
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
