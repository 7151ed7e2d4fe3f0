"""All open requests for engines. Each gets exactly one response and one log line, and is counted once.

Called by `listening` with a request and its route, and by `server` to drain and to stop. aiohttp cancels the task of a
request when its client disconnects.
"""

import asyncio
import contextlib
import math
import time

from aiohttp.web import BaseRequest, Response, StreamResponse

from conveyor_gateway.capacity.ledger import Hold
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.capacity.queries import run_held
from conveyor_gateway.clients import Client
from conveyor_gateway.errors import GatewayError
from conveyor_gateway.held_request import HeldRequest, find_owner
from conveyor_gateway.recording.record import Record
from conveyor_gateway.relaying.request_life import RequestLife, SharedParts
from conveyor_gateway.responses import build_error, build_stopping, find_request_id
from conveyor_gateway.routing import Route
from conveyor_gateway.watching.view import View


class OpenRequests:
    """The open requests, and those that have ended but are not recorded yet."""

    def __init__(self, parts: SharedParts) -> None:
        self._parts = parts
        self._running: set[HeldRequest] = set()
        self._recording: set[asyncio.Task[None]] = set()
        self._ended_at = -math.inf
        self._stopped = False

    async def handle(self, request: BaseRequest, route: Route, client: Client, view: View) -> StreamResponse:
        """Return the response for the client. A stream is already sent when this returns.

        client: the name for the log and the counts.
        """
        owner = "" if view.caller is None else view.caller.full_owner
        record = Record(find_request_id(request), route.path, client.id or "-", client.is_named, owner)
        self._parts.recorder.begin(record, request.headers)
        service = view.directory.services.get(route.service or "")
        held = HeldRequest(self._parts.ledger, request, find_owner(service, view))
        self._running.add(held)
        try:
            if self._stopped:
                raise build_stopping()
            with held:
                return await RequestLife(self._parts, request, route, record, held, view).run()
        except GatewayError as error:
            self._parts.key_log.note_error(view.caller, error.code)
            return _refuse(error, record)
        except asyncio.CancelledError:
            if held.error is None:
                record.set_client_gone()
                raise
            if request.writer.output_size > 0:
                record.reason = held.error.code
                raise
            held.clear()
            answer = _refuse(held.error, record)
            answer.force_close()
            return answer
        finally:
            self._running.discard(held)
            self._ended_at = time.monotonic()
            self._record_end(record, held)

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._running)

    async def wait_idle(self, seconds: float = 0.0) -> None:
        """Return when all requests have ended and are recorded, and the last one ended at least `seconds` ago."""
        while True:
            if tasks := {each.task for each in self._running} | self._recording:
                await asyncio.wait(tasks)
            elif (remaining_seconds := self._ended_at + seconds - time.monotonic()) > 0:
                await asyncio.sleep(remaining_seconds)
            else:
                return

    def stop(self) -> None:
        """End every open request with an error response."""
        self._stopped = True
        for each in self._running:
            each.cancel(build_stopping())

    def _record_end(self, record: Record, held: HeldRequest) -> None:
        """Record a request that has ended.

        An engine reports the used tokens at the end of its answer. If the answer ended early, this queries the engine
        first, because the tokens that it has generated count too.
        """
        record.end()
        if record.metered is not None:
            record.metered.leave()
        if not record.awaits_usage:
            self._parts.recorder.finish(record)
            return
        task = asyncio.create_task(self._request_and_finish(record, held.hold.owner))
        self._recording.add(task)
        task.add_done_callback(self._recording.discard)

    async def _request_and_finish(self, record: Record, owner: Owner) -> None:
        """Query the engine and record the request. If the ledger has no room, the usage known so far is recorded."""

        async def request(hold: Hold) -> None:
            record.usage = await self._parts.engines.fetch_usage(hold, record.engine, record.usage_key) or record.usage

        try:
            with contextlib.suppress(GatewayError):
                await run_held(self._parts.ledger, owner, request)
        finally:
            self._parts.recorder.finish(record)


def _refuse(error: GatewayError, record: Record) -> Response:
    record.status, record.reason = error.status, error.code
    return build_error(error, record.request_id, record.path)
