"""The life of one request for an engine: body, service, queue, engine, answer; retried before its first byte.

Called by `listening` with a request that `routing` has read. Every request ends in exactly one answer, one log line and
one count, also when the client goes away (aiohttp cancels the task then) and when the gateway stops (`stop` cancels
it).

A service that may go to zero may have to start first: a stream's connection is kept meanwhile (`heartbeat`).

Time: the service's requestTimeout (or what the client asked for, if that is less) bounds everything. The engine,
which is told the time that is left, ends what takes too long; the gateway, after a short grace, what goes on then.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Final

from aiohttp.web import BaseRequest, StreamResponse

from conveyor_gateway.admission.memory import Holding, Memory, build_too_many
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.answers import build_error, build_stopping, find_request_id
from conveyor_gateway.engines.client import (
    Answer,
    EngineBroke,
    EngineClient,
    EngineFull,
    EngineHasNoPlace,
    EngineLost,
    EngineRefused,
    EngineRequest,
    EngineUnreachable,
)
from conveyor_gateway.engines.headers import build_engine_headers
from conveyor_gateway.errors import Code, EngineFailed, GatewayError, InvalidRequest, NotFound, TimedOut
from conveyor_gateway.recording.record import Record, Recorder
from conveyor_gateway.relaying.bodies import BodyReader, read_model, rename_model
from conveyor_gateway.relaying.ending import Ending
from conveyor_gateway.relaying.heartbeat import Heartbeat
from conveyor_gateway.relaying.relay import Relay, clear_cancellation
from conveyor_gateway.routing import Route, find_model
from conveyor_gateway.watching.catalog import Directory, Service
from conveyor_gateway.watching.readiness import Readiness
from conveyor_protocol.request_headers import REQUEST_ID_HEADER, REQUEST_TIMEOUT_HEADER, parse_timeout_seconds

logger = logging.getLogger(__name__)

# A request whose engine dies is tried on one more engine only: it may be what ends them.
MAX_LOST: Final = 2


class OpenRequests:
    """All requests for engines that this process holds."""

    def __init__(
        self,
        directory: Directory,
        queues: Queues,
        engines: EngineClient,
        bodies: BodyReader,
        memory: Memory,
        recorder: Recorder,
        readiness: Readiness,
        heartbeat_seconds: float,
    ) -> None:
        self._directory = directory
        self._queues = queues
        self._engines = engines
        self._bodies = bodies
        self._memory = memory
        self._recorder = recorder
        self._ending = Ending(recorder, engines)
        self._readiness = readiness
        self._heartbeat_seconds = heartbeat_seconds
        self._running: set[asyncio.Task[object]] = set()
        self._ended_at = -math.inf
        self._evicted: set[asyncio.Task[object]] = set()
        self._stopped = False

    async def answer(self, request: BaseRequest, route: Route, client: str) -> StreamResponse:
        """What the client gets; a stream has been sent when this returns."""
        record = Record(find_request_id(request), route.path, client or "-")
        task = asyncio.current_task()
        assert task is not None, "aiohttp runs every handler in a task"
        self._running.add(task)
        try:
            if self._stopped:
                raise build_stopping()
            return await self._answer(request, route, client, record)
        except GatewayError as error:
            return self._refuse(error, record)
        except asyncio.CancelledError:
            ending = self._find_ending()
            if ending is None or request.writer.output_size > 0:
                record.set_client_gone()
                raise
            clear_cancellation()
            return self._refuse(ending, record)
        finally:
            self._running.discard(task)
            self._evicted.discard(task)
            self._ended_at = time.monotonic()
            self._ending.end(record)

    @property
    def num_open(self) -> int:
        """Requests that are held."""
        return len(self._running)

    async def wait_idle(self, seconds: float = 0.0) -> None:
        """Returns when no request is held, nor has been for so long, and all have been recorded."""
        while (tasks := self._running | self._ending.tasks) or self._ended_at + seconds > time.monotonic():
            if tasks:
                await asyncio.wait(tasks)
            else:
                await asyncio.sleep(self._ended_at + seconds - time.monotonic())

    def stop(self) -> None:
        """Ends every request that is still held, each with an answer."""
        self._stopped = True
        for task in self._running:
            task.cancel()

    def _build_evict(self) -> Callable[[], None]:
        """Ends the current request, which has to give its room to others."""
        task = asyncio.current_task()
        assert task is not None, "aiohttp runs every handler in a task"

        def evict() -> None:
            self._evicted.add(task)
            task.cancel()

        return evict

    def _find_ending(self) -> GatewayError | None:
        """Why this gateway has cancelled the current request; None: its client has left."""
        if asyncio.current_task() in self._evicted:
            return build_too_many()
        return build_stopping() if self._stopped else None

    def _refuse(self, error: GatewayError, record: Record) -> StreamResponse:
        record.status, record.reason = error.status, error.code
        return build_error(error, record.request_id)

    async def _answer(self, request: BaseRequest, route: Route, client: str, record: Record) -> StreamResponse:
        with Holding(self._memory, route.service or "", client) as holding:
            service, engine_request = await self._read(request, route, record, holding)
            timeout_seconds = _timeout_seconds(request, service) - record.age_seconds()
            ticket = self._queues[service.key].admit(asyncio.get_running_loop().time() + timeout_seconds)
            self._log_admitted(service, record, timeout_seconds)
            try:
                if service.idle_timeout_seconds is not None and route.may_stream:
                    return await self._answer_alive(request, engine_request, ticket, record)
                answer = await self._ask(engine_request, ticket, record)
                holding.keep()
                engine_request.release_body()  # nothing is tried again any more
                return await self._send(request, answer, ticket, record)
            finally:
                ticket.close()

    def _log_admitted(self, service: Service, record: Record, timeout_seconds: float) -> None:
        """For `--log-level=debug`: where the request was routed to, and what it meets there."""
        if logger.isEnabledFor(logging.DEBUG):
            queue = self._queues[service.key]
            logger.debug(
                "event=admitted id=%s service=%s path=%s queued=%d dispatched=%d engines=%d timeout_seconds=%.1f",
                record.request_id, service.key, record.path, queue.queued, queue.dispatched, queue.num_engines,
                timeout_seconds,
            )  # fmt: skip

    async def _answer_alive(
        self, request: BaseRequest, engine_request: EngineRequest, ticket: Ticket, record: Record
    ) -> StreamResponse:
        """For a service that may have to start first: meanwhile a stream's connection is kept."""
        heartbeat = Heartbeat(
            request, record.request_id, self._heartbeat_seconds, is_draining=lambda: self._readiness.draining
        )
        try:
            async with heartbeat.beating(engine_request.body):
                answer = await self._ask(engine_request, ticket, record)
        except GatewayError as error:
            if heartbeat.response is None:
                raise
            record.status, record.reason = heartbeat.response.status, error.code
            return await heartbeat.end(error)
        except asyncio.CancelledError:
            ending = self._find_ending()
            if ending is None or heartbeat.response is None:
                raise
            clear_cancellation()
            record.status, record.reason = heartbeat.response.status, ending.code
            return await heartbeat.end(ending)
        engine_request.holding.keep()
        engine_request.release_body()
        if heartbeat.response is None or answer.is_event_stream:
            return await self._send(request, answer, ticket, record, heartbeat.response)
        record.set_answered(heartbeat.response.status)
        record.leave_engine(answer.usage)
        answer.close()
        ticket.close()
        return await heartbeat.end_with(answer)

    async def _read(
        self, request: BaseRequest, route: Route, record: Record, holding: Holding
    ) -> tuple[Service, EngineRequest]:
        body = await self._bodies.read(request, holding, is_routed=route.service is None)
        service, body = self._find_service(request, route, body)
        record.service = service.key
        holding.wait(service.key, len(body), self._build_evict())
        headers = build_engine_headers(request.headers, record.request_id, record.usage_key)
        return service, EngineRequest(route.path, headers, body, holding)

    def _find_service(self, request: BaseRequest, route: Route, body: bytes) -> tuple[Service, bytes]:
        """The service, and the body as its engines understand it."""
        directory = self._directory
        if route.service is not None:
            service = directory.services.get(route.service)
            if service is not None:
                return service, body
            raise NotFound("the service was deleted", Code.SERVICE_DELETED)
        model = read_model(body, request.headers.get("Content-Encoding"))
        service = find_model(model, directory)
        if model != service.model_name:
            body = rename_model(body, service.model_name)
        return service, body

    async def _ask(self, request: EngineRequest, ticket: Ticket, record: Record) -> Answer:
        """The first engine's answer that has a first byte."""
        num_lost = 0
        while True:
            try:
                engine = await ticket.place()
            finally:
                record.waited_seconds = ticket.waited_seconds
            record.enter_engine(engine.address)
            logger.debug(
                "event=dispatched id=%s engine=%s attempt=%d wait_seconds=%.4f granted=%s",
                record.request_id, engine.address, record.attempts, record.waited_seconds, ticket.is_granted,
            )  # fmt: skip
            try:
                answer = await self._ask_one(engine.address, request, ticket)
            except EngineHasNoPlace as error:
                self._recorder.retry(record, "no_place", error)
                ticket.note_no_place()
            except EngineFull as error:
                self._recorder.retry(record, "refused", error)
                ticket.note_full()
            except EngineRefused as error:
                self._recorder.retry(record, "refused", error)
                ticket.note_failure(isinstance(error, EngineUnreachable))
            except EngineLost as error:
                num_lost += 1
                ticket.note_failure()
                if num_lost == MAX_LOST:
                    record.leave_engine(None)
                    raise EngineFailed(
                        f"{num_lost} engines broke off before they answered", Code.ENGINE_LOST
                    ) from error
                self._recorder.retry(record, "lost", error)
            except EngineBroke as error:
                ticket.note_failure()
                record.leave_engine(None)
                raise EngineFailed(f"the engine broke off in its answer: {error}", Code.ENGINE_BROKE) from error
            else:
                ticket.note_answer()
                self._recorder.first_byte(record)
                return answer
            record.leave_engine(None)
            ticket.give_back()

    async def _ask_one(self, address: str, request: EngineRequest, ticket: Ticket) -> Answer:
        try:
            async with asyncio.timeout_at(ticket.deadline):
                remaining_seconds = ticket.deadline - asyncio.get_running_loop().time()
                return await self._engines.ask(address, request, remaining_seconds, ticket.is_granted)
        except TimeoutError:
            raise TimedOut("the engine did not answer in the request's time", Code.DEADLINE_EXCEEDED) from None

    async def _send(
        self,
        request: BaseRequest,
        answer: Answer,
        ticket: Ticket,
        record: Record,
        begun: StreamResponse | None = None,
    ) -> StreamResponse:
        record.set_answered(answer.status)
        answer.headers[REQUEST_ID_HEADER] = record.request_id
        relay = Relay(
            request,
            answer,
            record,
            ticket.deadline,
            is_stopping=lambda: self._stopped,
            keep_alive=not self._readiness.draining,
        )
        try:
            if answer.is_whole:
                ticket.close()  # the engine's place is free, however slowly the client reads
                record.leave_engine(answer.usage)
                return await relay.send_whole()
            return await relay.send_stream(begun)
        finally:
            record.leave_engine(answer.usage, answer.awaits_report)
            answer.close()


def _timeout_seconds(request: BaseRequest, service: Service) -> float:
    """The service's limit, or what the client asks for if that is less."""
    text = request.headers.get(REQUEST_TIMEOUT_HEADER)
    if text is None:
        return service.request_timeout_seconds
    try:
        return min(parse_timeout_seconds(text), service.request_timeout_seconds)
    except ValueError as error:
        raise InvalidRequest(str(error), Code.INVALID_TIMEOUT, REQUEST_TIMEOUT_HEADER) from None
