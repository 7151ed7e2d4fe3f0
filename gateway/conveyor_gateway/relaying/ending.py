"""The end of a request, when its client has its answer or has left: one log line and its counts.

Called by `request_life`. An engine reports what a request has used at the end of its answer. If the answer ended
before that, the engine is asked, since what it had generated until then costs as much.
"""

import asyncio
from typing import Final

from conveyor_gateway.engines.client import EngineClient
from conveyor_gateway.recording.record import Record, Recorder

MAX_ASKING: Final = 256  # requests at once; beyond that, a request is recorded with what is known


class Ending:
    """Of all requests. `tasks` are those that are not recorded yet."""

    def __init__(self, recorder: Recorder, engines: EngineClient) -> None:
        self._recorder = recorder
        self._engines = engines
        self.tasks: set[asyncio.Task[object]] = set()

    def end(self, record: Record) -> None:
        """To be called once for each request."""
        record.end()
        if not record.awaits_usage or len(self.tasks) >= MAX_ASKING:
            self._recorder.finish(record)
            return
        task = asyncio.create_task(self._ask_and_finish(record))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _ask_and_finish(self, record: Record) -> None:
        try:
            record.usage = await self._engines.fetch_usage(record.engine, record.usage_key) or record.usage
        finally:
            self._recorder.finish(record)
