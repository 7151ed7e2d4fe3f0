"""Sends a request to one engine after another, until one returns the first byte of its answer.

Called by `request_life`. The queue chooses the engine for each attempt, and `Attempts` reports the result to the queue.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.admission.ticket import Ticket
from conveyor_gateway.engines.exchange import (
    EngineAnswer,
    EngineBroke,
    EngineFull,
    EngineHasNoPlace,
    EngineIsBehind,
    EngineLost,
    EngineRefused,
    EngineRequest,
    EngineSilent,
    EngineUnreachable,
)
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.recording.record import OWN_NAME, Record, Recorder
from conveyor_gateway.relaying.deaths import DEATHS_MAX, REMEMBERED_SECONDS, Deaths, has_form
from conveyor_protocol.request_headers import RECEIPT_HEADER, write_receipt_request

logger = logging.getLogger(__name__)

# If its engine dies, a request is sent to only one more engine, because the request itself may be the cause.
MAX_LOST: Final = 2


@dataclass(slots=True)
class Attempts:
    """The attempts of one request."""

    engines: EngineSession
    recorder: Recorder
    queue: ServiceQueue
    ticket: Ticket
    record: Record
    deaths: Deaths
    _num_lost: int = 0

    async def send(self, request: EngineRequest) -> EngineAnswer:
        """Return the answer of the first engine that returns one.

        Raises GatewayError.
        """
        while True:
            self._check_deaths(request)
            address = await self._wait_for_engine()
            self._check_deaths(request)
            sent_at = time.monotonic()
            try:
                answer = await self._send_to(address, request)
            except (EngineRefused, EngineLost, EngineBroke) as error:
                self.record.leave_engine(None)
                self.record.num_refused += isinstance(error, EngineRefused)
                self._note(error, request, address, sent_at)
                self.queue.requeue(self.ticket)
            else:
                self.queue.note_answer(self.ticket)
                self.recorder.first_byte(self.record)
                return answer

    def _check_deaths(self, request: EngineRequest) -> None:
        """Raise GatewayError if too many engines have died with this body, perhaps while it waited."""
        if self.deaths.is_refused(request.body):
            raise GatewayError(
                f"{DEATHS_MAX} engines died with this request in the last {REMEMBERED_SECONDS:g} s; change the request",
                Code.ENDS_ENGINES,
            )

    async def _wait_for_engine(self) -> str:
        ticket, record = self.ticket, self.record
        try:
            engine = await self.queue.wait_for_engine(ticket)
        finally:
            record.waited_seconds = ticket.waited_seconds
        record.enter_engine(engine.address)
        logger.debug(
            "event=dispatched id=%s engine=%s attempt=%d wait_seconds=%.4f granted=%s",
            record.request_id, engine.address, record.attempts, record.waited_seconds, ticket.is_granted,
        )  # fmt: skip
        return engine.address

    async def _send_to(self, address: str, request: EngineRequest) -> EngineAnswer:
        ticket, deadline = self.ticket, self.ticket.deadline
        if self.record.wants_receipt:
            request.headers[RECEIPT_HEADER] = write_receipt_request(OWN_NAME, self.record.waited_seconds)
        try:
            async with asyncio.timeout_at(deadline):
                remaining_seconds = deadline - asyncio.get_running_loop().time()
                return await self.engines.send(address, request, remaining_seconds, ticket.is_granted, ticket.level)
        except TimeoutError:
            message = "the engine did not respond before the request's deadline"
            raise GatewayError(message, Code.DEADLINE_EXCEEDED) from None

    def _note(
        self, error: EngineRefused | EngineLost | EngineBroke, request: EngineRequest, address: str, sent_at: float
    ) -> None:
        """Report a failed attempt to the queue and the recorder.

        Raises GatewayError if no other engine may be tried.
        """
        reason = "refused"
        match error:
            case EngineHasNoPlace():
                reason = "no_place"
                self.queue.note_no_place(self.ticket)
            case EngineFull():
                self.queue.note_full(self.ticket)
            case EngineIsBehind():
                reason = "behind"
                self.queue.note_behind(self.ticket)
            case EngineRefused():
                self.queue.note_failure(self.ticket, isinstance(error, EngineUnreachable))
            case EngineBroke():
                self.queue.note_failure(self.ticket)
                raise GatewayError(f"the engine failed during its response: {error}", Code.ENGINE_BROKE) from error
            case _:
                reason = "lost"
                self.queue.note_failure(self.ticket)
                self._num_lost += 1
                if has_form(request.body):
                    is_silent = isinstance(error, EngineSilent)
                    self.deaths.note(request.body, address, sent_at, is_silent)
                    if not is_silent:
                        words = "the engine failed before it responded; a request with a form is not sent to another"
                        raise GatewayError(words, Code.ENGINE_LOST) from error
                if self._num_lost == MAX_LOST:
                    words = f"{MAX_LOST} engines failed before they responded"
                    raise GatewayError(words, Code.ENGINE_LOST) from error
        self.recorder.retry(self.record, reason, error)
