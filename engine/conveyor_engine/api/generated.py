"""A generating request from its arrival to its answer, whole or as server-sent events.

Used by `completions` and `chat`, which make engine requests of a body and JSON of what comes back. Whatever happens,
exactly one answer ends: a whole body, a stream that closes with [DONE], an error status, or an error event in a stream
that had begun. A client that leaves ends its request in the engine, streamed or not.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conveyor_engine.api.choice import Choice, Delta
from conveyor_engine.api.edge import Edge, body_bytes_max, edge_of, model_facts, read_body, timeout_seconds
from conveyor_engine.api.failures import failure_body
from conveyor_engine.api.prepare import Job, Kind, Prepared
from conveyor_engine.errors import ConveyorEngineError, DeadlineExceeded
from conveyor_engine.generation import Generation
from conveyor_engine.request import RequestOutput
from conveyor_engine.stop_strings import StopStrings

_log = logging.getLogger(__name__)
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LINE_ENDS = tuple((end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\u0085\u2028\u2029")
_encode = msgspec.json.Encoder().encode


class Usage(msgspec.Struct):
    """Token counts: of the whole answer, where each prompt counts once, or of one choice so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Format(Protocol):
    """How answers look: completions or chat."""

    def chunk(self, delta: Delta, usage: Usage | None) -> msgspec.Struct:
        """One event of a stream, with its choice's counts so far when each is to have them."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The event with the counts, when asked for."""

    def whole(self, deltas: list[list[Delta]], usage: Usage) -> msgspec.Struct:
        """The one body; `deltas[i]` are choice i's."""


async def generate(
    request: Request, kind: Kind, make_format: Callable[[Edge, Prepared], Format]
) -> "GeneratedResponse":
    """Hands the request to the engine. From its head on its time runs; from the end of its body on it holds a place."""
    arrival = time.monotonic()
    edge = edge_of(request)
    facts = model_facts(edge)
    timeout = timeout_seconds(request, edge.config.request_timeout_seconds)
    body = await read_body(request, body_bytes_max(facts.max_model_len))
    with edge.engine.hold_place():
        job = Job(kind, facts, edge.engine.num_requests_max, arrival, body)
        try:
            async with asyncio.timeout(arrival + timeout - time.monotonic()):
                prepared = await edge.preparers.prepare(job)
        except TimeoutError:
            raise DeadlineExceeded("the request's time ran out before its prompt was tokenized") from None
        request_ids = [choice.request_id for choice in prepared.choices]
        generation = edge.engine.open_generation(request_ids, prepared.add, arrival + timeout - time.monotonic())
    return GeneratedResponse(edge, prepared, make_format(edge, prepared), generation)


class GeneratedResponse(Response):
    """An answer that is made while it is sent."""

    def __init__(self, edge: Edge, prepared: Prepared, answer_format: Format, generation: Generation) -> None:
        super().__init__()
        self._edge = edge
        self._prepared = prepared
        self._format = answer_format
        self._generation = generation
        stop = StopStrings(prepared.stop)
        self._choices = [
            Choice(index, choice, stop, edge.tokenizer, edge.metrics) for index, choice in enumerate(prepared.choices)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Errors before the first byte are raised, for the app's handlers to answer."""
        async with self._generation:
            await self._answer_or_leave(receive, send)

    async def _answer_or_leave(self, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(send))
        watch = asyncio.create_task(_client_left(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                _log.info("event=client_left id=%s", self._prepared.id)
                for choice in self._choices:
                    choice.leave()
        finally:
            for task in (work, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConveyorEngineError):
                    await task

    async def _answer(self, send: Send) -> None:
        for choice in self._prepared.choices:
            self._edge.metrics.observe_prompt(choice.num_prompt_tokens, choice.max_tokens)
        deltas = self._deltas(self._generation.batches())
        if self._prepared.stream:
            await self._send_stream(deltas, send)
        else:
            await self._send_whole(deltas, send)

    async def _deltas(self, batches: AsyncIterator[list[RequestOutput]]) -> AsyncIterator[list[Delta]]:
        """What is new, batch by batch, until every choice is finished."""
        by_id = {choice.request_id: choice for choice in self._choices}
        async for outputs in batches:
            deltas: list[Delta] = []
            stopped: list[str] = []
            for output in outputs:
                choice = by_id[output.request_id]
                if choice.finish_reason is not None:
                    continue  # a stop string ended it; the engine did not know yet
                if (delta := choice.take(output)) is not None:
                    deltas.append(delta)
                if choice.finish_reason is not None and output.finish_reason is None:
                    stopped.append(choice.request_id)
            if stopped:
                self._edge.engine.abort(stopped)
            if deltas:
                yield deltas
            if all(choice.finish_reason is not None for choice in self._choices):
                return

    async def _send_whole(self, batches: AsyncIterator[list[Delta]], send: Send) -> None:
        collected: list[list[Delta]] = [[] for _ in self._choices]
        async for deltas in batches:
            for delta in deltas:
                collected[delta.choice].append(delta)
        body = _encode(self._format.whole(collected, self._usage()))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _send_stream(self, batches: AsyncIterator[list[Delta]], send: Send) -> None:
        """The status waits for the first tokens, so that until then a failure is an error status."""
        first = await anext(batches)
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        try:
            await self._send_events(first, send)
            async for deltas in batches:
                await self._send_events(deltas, send)
            last = b"data: [DONE]\n\n"
            if self._prepared.include_usage:
                last = event(_encode(self._format.usage_chunk(self._usage()))) + last
        except ConveyorEngineError as error:
            _log.info("event=stream_failed id=%s error=%s", self._prepared.id, type(error).__name__)
            last = event(failure_body(error))
        await send({"type": "http.response.body", "body": last})

    async def _send_events(self, deltas: list[Delta], send: Send) -> None:
        events = b"".join(event(_encode(self._format.chunk(delta, self._usage_so_far(delta)))) for delta in deltas)
        await send({"type": "http.response.body", "body": events, "more_body": True})

    def _usage(self) -> Usage:
        prompt_tokens = self._prepared.num_prompt_tokens
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        first_choices = self._choices[:: self._prepared.choices_per_prompt]
        cached = sum(choice.num_cached_tokens for choice in first_choices)
        return _count(prompt_tokens, completion_tokens, cached)

    def _usage_so_far(self, delta: Delta) -> Usage | None:
        if not self._prepared.continuous_usage:
            return None
        prompt_tokens = self._prepared.choices[delta.choice].num_prompt_tokens
        return _count(prompt_tokens, delta.num_tokens, self._choices[delta.choice].num_cached_tokens)


def _count(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    total_tokens = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total_tokens, {"cached_tokens": cached_tokens})


def event(data: bytes) -> bytes:
    """JSON as one event. Unicode's own line ends are escaped: clients that split text into lines break at them."""
    for line_end, escaped in _LINE_ENDS:
        data = data.replace(line_end, escaped)
    return b"data: " + data + b"\n\n"


async def _client_left(receive: Receive) -> None:
    """Returns when the connection is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
