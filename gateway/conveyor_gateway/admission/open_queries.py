"""Queries engines for free places while requests wait. At each address, one query or one return is open at most.

Used by `dispatcher` only. The engine answers when it has reserved a place for this gateway. An engine may be a tenant's
own program, and never answer.
"""

import asyncio
from collections.abc import Callable

from conveyor_gateway.admission.engine_order import Engine
from conveyor_gateway.admission.place_queries import PlaceQueries


class OpenQueries:
    """Calls `on_answer(engine, is_granted)` after each query. `on_answer` returns whether a request uses the place.

    A query stays open until the engine answers. A place that no request uses is given back. `on_end` is called when the
    engine can be queried again.
    """

    def __init__(
        self, engines: PlaceQueries, on_answer: Callable[[Engine, bool], bool], on_end: Callable[[], None]
    ) -> None:
        self._engines = engines
        self._on_answer = on_answer
        self._on_end = on_end
        self._queried: set[str] = set()  # addresses, because a pod that is ready again is a new `Engine`
        self._tasks: set[asyncio.Task[None]] = set()

    def query(self, engine: Engine, level: int) -> bool:
        """Query an engine for a place; return False if a query to it is open. A lower `level` is more urgent."""
        if engine.address in self._queried:
            return False
        self._queried.add(engine.address)
        task = asyncio.create_task(self._query(engine, level))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _query(self, engine: Engine, level: int) -> None:
        address = engine.address
        granted = await self._engines.request_place(address, level)
        if not self._on_answer(engine, granted) and granted:
            await self._engines.give_place_back(address)
        self._queried.discard(address)
        self._on_end()
