"""Takes a request from its arrival to its answer, for every task. Calls the modules that read, validate and run it.

A route calls `open_request`, which sends the request to the engine. The route then returns an `EngineResponse`, whose
subclasses (in `generated` and `one_step`, for example) turn the engine's outputs into an answer. When a client leaves,
its requests in the engine are aborted.
"""

import asyncio
import contextlib
import logging
import sys
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from conveyor_engine.errors import DeadlineExceeded, Overloaded, RequestError
from conveyor_engine.serving.generation import Generation
from conveyor_engine.serving.http.app_state import AppState, app_state, model_facts
from conveyor_engine.serving.http.memory import Held
from conveyor_engine.serving.http.reading import (
    body_bytes_max,
    json_length,
    read_body,
    request_level,
    timeout_seconds,
)
from conveyor_engine.serving.http.receipts import Receipt, build_receipt, find_receipt_request
from conveyor_engine.serving.http.request_spans import EndedRequest, find_trace_parent
from conveyor_engine.serving.http.usage import Report, find_report
from conveyor_engine.serving.preparing.jobs import FilesWanted, Prepared, choose_kind
from conveyor_engine.wire.worker import Job
from conveyor_protocol.request_headers import PLACE_HEADER, RECEIPT_HEADER, ReceiptRequest
from conveyor_protocol.usage import UsedTokens

_log = logging.getLogger(__name__)
_READING_SECONDS = 5.0  # how long a client may read the answer after the request's timeout
_PIECE_BYTES = 32 * 2**10
_CONTENT_TYPE_CHARACTERS = 256  # long enough for a multipart boundary, which has at most 70


@dataclass(frozen=True, slots=True)
class Opened:
    """A request that was sent to the engine."""

    state: AppState
    prepared: Prepared
    generation: Generation
    arrived: float  # when its head had arrived, by time.monotonic()
    seconds: float  # how long its answer may take


@dataclass(frozen=True, slots=True)
class Arriving:
    """A validated request that holds a place. Times are those of time.monotonic().

    place_condition: as in `EngineClient.hold_place`.
    """

    state: AppState
    prepared: Prepared
    arrived: float
    deadline: float
    place_condition: str | None


@asynccontextmanager
async def prepare_request(request: Request, kind: str) -> AsyncIterator[Arriving]:
    """Read and validate the request. The request holds a place from the arrival of its body to the end of `async with`.

    The request's timeout starts when its head has arrived. Raises InvalidRequest, Unavailable, Overloaded or
    DeadlineExceeded.
    """
    arrival = time.monotonic()
    state = app_state(request)
    facts = model_facts(state)
    timeout = timeout_seconds(request, state.config.request_timeout_seconds)
    level, json_bytes = request_level(request), json_length(request)
    async with state.memory.hold(timeout) as held:
        body = await read_body(request, body_bytes_max(facts), held)
        place_condition = request.headers.get(PLACE_HEADER)
        with state.engine.hold_place(place_condition):
            content_type = request.headers.get("content-type", "")[:_CONTENT_TYPE_CHARACTERS]
            num_max, deadline = state.engine.num_requests_max, arrival + timeout
            chosen = choose_kind(facts, kind, body)
            job = Job(
                chosen, facts, num_max, arrival, body, level, deadline, json_bytes, content_type, state.model.adapters
            )
            prepared = await _prepare(state, job, held)
            state.metrics.count_ignored_fields(kind, prepared.ignored_fields)
            yield Arriving(state, prepared, arrival, arrival + timeout, place_condition)


async def _prepare(state: AppState, job: Job, held: Held) -> Prepared:
    """Return the prepared request. Fetches the files that its body names by URL."""
    try:
        return await state.workers.prepare(job)
    except FilesWanted as wanted:
        names = wanted.names
    fetched = await state.media.fetch(names, held.grow)
    return await state.workers.prepare(msgspec.structs.replace(job, fetched=fetched))


async def open_request(request: Request, kind: str) -> Opened:
    """Read and validate the request, and send it to the engine. Raises the same errors as `prepare_request`."""
    async with prepare_request(request, kind) as arriving:
        state, prepared = arriving.state, arriving.prepared
        seconds_left = arriving.deadline - time.monotonic()
        generation = state.engine.open_generation(prepared.parts, seconds_left, arriving.place_condition)
    assert isinstance(prepared, msgspec.Struct)
    sent = msgspec.structs.replace(prepared, parts=[])  # the answer does not need the prompts
    return Opened(state, sent, generation, arriving.arrived, seconds_left)


class EngineResponse(Response):
    """A response whose body is produced while it is sent."""

    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self._state = opened.state
        self._id = opened.prepared.id
        self._generation = opened.generation
        self._arrived = opened.arrived
        self._held = opened.state.memory.hold(opened.seconds + _READING_SECONDS)
        self._started = False
        self._error = ""  # the kind of failure that ended a started answer
        self._report: Report | None = None
        self._receipt_request: ReceiptRequest | None = None
        self._usage_has_receipt = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Errors before the first byte are raised, so that the app's handlers respond with a status.
        """
        if (report := find_report(scope)) is not None:
            report.count, report.bill, self._report = self._count_used, self._generation.bill, report
        self._receipt_request = find_receipt_request(scope)
        try:
            async with self._generation, self._held:
                self._generation.on_held = self._held.grow
                self._held.grow(sum(len(part.add) for part in self._generation.unsent))
                await self._send_or_leave(receive, send)
        except (Overloaded, DeadlineExceeded) as error:
            if not self._started:
                raise
            self._error = type(error).__name__
            _log.info("event=reader_too_slow id=%s error=%s", self._id, self._error)
            # The answer stays incomplete, so the server closes the connection.
        finally:
            if self._state.spans is not None:
                self._state.spans.add(self._describe_end(scope))

    def _describe_end(self, scope: Scope) -> EndedRequest:
        """Return what the request's spans are made of. Called after its end, also after an error."""
        error = sys.exception()
        return EndedRequest(
            find_trace_parent(scope),
            scope["path"],
            self._id,
            self._generation.bill,
            self._count_used,
            self._arrived,
            self._generation.opened_at,
            time.monotonic(),
            self._error if error is None else type(error).__name__,
        )

    def _note_failure(self, error: RequestError) -> None:
        """Record an error that ends a started stream. The stream's last event has to describe it."""
        self._error = type(error).__name__
        if self._report is not None and error.code.status >= 500:
            self._report.error = self._error
        _log.info("event=stream_failed id=%s error=%s", self._id, self._error)

    @abstractmethod
    async def _send_answer(self, send: Send) -> None:
        """Send the whole answer."""

    @abstractmethod
    def _count_used(self) -> UsedTokens:
        """Return the tokens that the request has used so far."""

    @abstractmethod
    def _leave(self) -> None:
        """End everything that is not finished. Called after the client has left."""

    def _find_receipt(self, cached_tokens: int | UnsetType = UNSET) -> Receipt | UnsetType:
        """Return the receipt for the last `usage` of the answer; UNSET unless the request has the header."""
        if self._receipt_request is None:
            return UNSET
        self._usage_has_receipt = True
        return build_receipt(self._generation.bill, self._receipt_request, cached_tokens)

    async def _send_or_leave(self, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send_answer(send))
        watch = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                _log.info("event=client_left id=%s", self._id)
                self._leave()
        finally:
            for task in (work, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestError):
                    await task

    async def _start(self, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        """Send the status and the headers. After that, an error cannot change the status."""
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_json(self, pieces: Iterator[bytes], send: Send) -> None:
        await self._send_body(pieces, [(b"content-type", b"application/json")], send)

    async def _start_whole(self, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        """Start a response that is not a stream. If its body has no receipt, it gets the header."""
        if self._receipt_request is not None and not self._usage_has_receipt:
            receipt = build_receipt(self._generation.bill, self._receipt_request)
            headers = [*headers, (RECEIPT_HEADER.lower().encode(), msgspec.json.encode(receipt))]
        await self._start(headers, send)

    async def _send_body(self, pieces: Iterator[bytes], headers: list[tuple[bytes, bytes]], send: Send) -> None:
        """Send a short body with its length.

        A long body is produced while it is sent, so it is never whole in memory.
        """
        body = b""
        for piece in pieces:
            body += piece
            if len(body) >= _PIECE_BYTES:
                if not self._started:
                    await self._start_whole(headers, send)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
                await self._generation.turns.wait()
        if not self._started:
            headers.append((b"content-length", b"%d" % len(body)))
            await self._start_whole(headers, send)
        await send({"type": "http.response.body", "body": body})


async def client_left(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
