"""The life of one request for an engine: body, service, queue, engine, answer. `RequestLife.run` calls each part.

Called by `open_requests`. A service that scales to zero may have to start first. Meanwhile `heartbeat` keeps the
connection of a stream open.

Time: the service's requestTimeout, or a shorter time from the client, limits the whole request. The engine gets the
remaining time, and ends the request when this time is over. If the engine does not, the gateway ends the request after
a short grace period.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from aiohttp.web import BaseRequest, StreamResponse

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket, Work
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.engines.exchange import EngineAnswer, EngineRequest
from conveyor_gateway.engines.headers import build_engine_headers
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.held_request import HeldRequest, find_owner
from conveyor_gateway.metering.meters import Meters
from conveyor_gateway.recording.record import Record, Recorder
from conveyor_gateway.relaying.attempts import Attempts
from conveyor_gateway.relaying.bodies import (
    MAX_ROUTED_BYTES,
    NO_FIELDS,
    BodyReader,
    read_model,
    read_queue_fields,
    rename_model,
)
from conveyor_gateway.relaying.deaths import Deaths
from conveyor_gateway.relaying.forms import find_model_field, is_form, rename_model_field
from conveyor_gateway.relaying.heartbeat import Heartbeat
from conveyor_gateway.relaying.long_bodies import find_long_model
from conveyor_gateway.relaying.prefixes import find_prefix
from conveyor_gateway.relaying.priority import Priority, choose_priority
from conveyor_gateway.relaying.relay import Relay
from conveyor_gateway.relaying.waking import check_may_wake
from conveyor_gateway.relaying.work import estimate_work, find_work
from conveyor_gateway.routing import Route, find_model
from conveyor_gateway.watching.catalog import Directory, NamedModel, Service
from conveyor_gateway.watching.key_uses import KeyLog
from conveyor_gateway.watching.readiness import Readiness
from conveyor_gateway.watching.view import View
from conveyor_protocol.open_inference import JSON_LENGTH_HEADER
from conveyor_protocol.request_headers import (
    CLASS_HEADER,
    RECEIPT_HEADER,
    REQUEST_ID_HEADER,
    REQUEST_TIMEOUT_HEADER,
    parse_receipt_request,
    parse_timeout_seconds,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The objects that all requests of this process share."""

    directory: Directory
    queues: Queues
    engines: EngineSession
    bodies: BodyReader
    ledger: Ledger
    meters: Meters
    recorder: Recorder
    readiness: Readiness
    heartbeat_seconds: float
    deaths: Deaths
    key_log: KeyLog


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A request whose body has arrived, and what the gateway read of it."""

    service: Service
    engine_request: EngineRequest
    priority: Priority
    work: Work
    prefix: int | None  # the hashed beginning of its prompt, if engines may have it
    timeout_seconds: float


@dataclass(slots=True)
class RequestLife:
    """One request. Its methods raise subclasses of GatewayError."""

    parts: SharedParts
    request: BaseRequest
    route: Route
    record: Record
    held: HeldRequest
    view: View

    async def run(self) -> StreamResponse:
        """Return the response for the client. A stream is already sent when this returns."""
        parts, arrived = self.parts, await self._read()
        service, engine_request = arrived.service, arrived.engine_request
        queue = parts.queues[service.key]
        self.record.metered = parts.meters.enter(self.view.caller, arrived.work.prompt_tokens)
        ticket = self._admit(arrived, queue)
        try:
            attempts = Attempts(parts.engines, parts.recorder, queue, ticket, self.record, parts.deaths)
            if self.route.may_stream:
                return await self._run_alive(attempts, engine_request, queue, ticket)
            answer = await attempts.send(engine_request)
            engine_request.note_answer(answer.is_whole)
            return await self._relay(answer, queue, ticket)
        finally:
            queue.finish(ticket)

    async def _read(self) -> _Arrived:
        request, record, hold = self.request, self.record, self.held.hold
        if self.route.service is None:
            self.view.check_any()
        has_form = is_form(request.headers.get("Content-Type"))
        body = await self.parts.bodies.read(request, hold, self.route.max_bytes)
        model, body = self._find_model(body)
        service = model.service
        record.service = service.key
        if service.is_asleep:
            is_json = not has_form and JSON_LENGTH_HEADER not in request.headers
            check_may_wake(service, self.route, body if is_json else None)
        named_class, timeout_seconds = request.headers.get(CLASS_HEADER), _find_timeout_seconds(request, service)
        fields, json_body = (NO_FIELDS, b"") if has_form else (read_queue_fields(body), body)
        work = estimate_work(service, body, fields, self.route.may_stream)
        max_class = self.view.caller.max_class if self.view.caller is not None else ""
        priority = choose_priority(service, named_class, json_body, fields, timeout_seconds, work, max_class)
        record.wants_receipt = parse_receipt_request(request.headers.get(RECEIPT_HEADER, "")) is not None
        record.request_class, record.is_lowered = priority.request_class.name, priority.is_lowered
        owner = hold.owner if hold.owner.service == service.key else find_owner(service, self.view)
        hold.note_arrived(owner, len(body), priority.request_class.level)
        headers = build_engine_headers(request.headers, record.request_id, record.usage_key)
        if record.trace is not None:
            record.trace.write_headers(headers)
        is_coming = partial(self.parts.directory.is_coming, service.key)
        engine_request = EngineRequest(self.route.fill_path(model), headers, body, hold, is_coming)
        has_homes = self.route.may_stream and self.parts.queues[service.key].has_homes
        prefix = find_prefix(fields, service) if has_homes else None
        return _Arrived(service, engine_request, priority, work, prefix, timeout_seconds)

    def _find_model(self, body: bytes) -> tuple[NamedModel, bytes]:
        """Return the service with the named model, and the body with the model name that its engines expect.

        At a service's own path, engines read the name, so an adapter is not looked up here.
        """
        view = self.view
        if self.route.service is not None:
            service = view.find_service(self.route.service)
            if service is not None:
                return NamedModel(service), body
            raise GatewayError("the service was deleted", Code.SERVICE_DELETED)
        if self.route.model:
            return find_model(self.route.model, view), body
        content_type = self.request.headers.get("Content-Type", "")
        if is_form(content_type) or len(body) > MAX_ROUTED_BYTES:
            field = find_model_field(body, content_type) if is_form(content_type) else find_long_model(body)
            found = find_model(field.model, view)
            return found, rename_model_field(body, field, found.engine_name)
        name = read_model(body)
        found = find_model(name, view)
        if name != found.engine_name:
            body = rename_model(body, found.engine_name)
        return found, body

    def _admit(self, arrived: _Arrived, queue: ServiceQueue) -> Ticket:
        priority, timeout_seconds = arrived.priority, arrived.timeout_seconds - self.record.age_seconds()
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        client = self.held.hold.owner.client
        self.record.enter_queue()
        ticket = queue.admit(
            deadline, priority.request_class, priority.offset_seconds, arrived.prefix, client, arrived.work
        )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "event=admitted id=%s service=%s path=%s queued=%d dispatched=%d engines=%d timeout_seconds=%.1f",
                self.record.request_id, arrived.service.key, self.record.path, queue.queued, queue.dispatched,
                queue.num_engines, timeout_seconds,
            )  # fmt: skip
        return ticket

    async def _run_alive(
        self, attempts: Attempts, engine_request: EngineRequest, queue: ServiceQueue, ticket: Ticket
    ) -> StreamResponse:
        """Run a request for a stream, and keep its connection open until the answer begins."""
        parts, body = self.parts, engine_request.body
        heartbeat = Heartbeat(self.request, body, self.record, parts.heartbeat_seconds, parts.readiness)
        try:
            async with heartbeat:
                answer = await attempts.send(engine_request)
        except GatewayError as error:
            if heartbeat.response is None:
                raise
            return await heartbeat.end_with_error(error)
        except asyncio.CancelledError:
            if self.held.error is None or heartbeat.response is None:
                raise
            self.held.clear()
            return await heartbeat.end_with_error(self.held.error)
        engine_request.note_answer(answer.is_whole)
        if heartbeat.response is None or answer.is_event_stream:
            return await self._relay(answer, queue, ticket, heartbeat.response)
        answer.close()
        queue.finish(ticket)
        return await heartbeat.end_with_answer(answer)

    async def _relay(
        self, answer: EngineAnswer, queue: ServiceQueue, ticket: Ticket, begun: StreamResponse | None = None
    ) -> StreamResponse:
        record = self.record
        record.set_answered(answer.status)
        answer.headers[REQUEST_ID_HEADER] = record.request_id
        if record.metered is not None:
            answer.headers.update(record.metered.write_headers())
        keep_alive = not self.parts.readiness.draining
        relay = Relay(self.request, answer, record, ticket.deadline, self.held, keep_alive)
        try:
            if answer.is_whole:
                # This frees the engine's place, however slowly the client reads.
                self._leave_engine(answer, queue, ticket, len(answer.first))
                return await relay.send_whole()
            return await relay.send_stream(begun)
        finally:
            answer.close()
            if not answer.is_whole:
                self._leave_engine(answer, queue, ticket, record.sent_bytes)

    def _leave_engine(self, answer: EngineAnswer, queue: ServiceQueue, ticket: Ticket, num_bytes: int) -> None:
        """Free the engine's place and count what the request has used. num_bytes: of its answer."""
        used, metered = find_work(answer, ticket.work, num_bytes), self.record.metered
        self.record.leave_engine(answer.usage, answer.awaits_report)
        queue.finish(ticket, used)
        if metered is not None and not answer.is_event_stream:  # the events of a stream are counted already
            metered.count_tokens(used.answer_tokens)


def _find_timeout_seconds(request: BaseRequest, service: Service) -> float:
    """Return the service's timeout, or the client's if it is shorter. Raises GatewayError."""
    text = request.headers.get(REQUEST_TIMEOUT_HEADER)
    if text is None:
        return service.request_timeout_seconds
    try:
        return min(parse_timeout_seconds(text), service.request_timeout_seconds)
    except ValueError as error:
        raise GatewayError(str(error), Code.INVALID_TIMEOUT, REQUEST_TIMEOUT_HEADER) from None
