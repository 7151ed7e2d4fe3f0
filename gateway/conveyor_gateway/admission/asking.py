"""Asks engines for a place, one question each, while somebody waits.

Used by `service_queue` only. The engine answers when it has kept a place for this gateway (`engines.client`).
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from conveyor_gateway.admission.engine_pool import Engine


class Granting(Protocol):
    """Engines that grant places, by address (`host:port`)."""

    async def ask_for_place(self, address: str) -> bool:
        """Returns when the engine has kept a place; False if it cannot be asked."""

    async def give_place_back(self, address: str) -> None:
        """The place that it has kept is not needed."""


class Asking:
    """`on_answer` is told of an engine and whether it has kept a place, and returns whether that is used.

    A question stands until it is answered: a place that nobody waits for any more is given back.
    """

    def __init__(self, engines: Granting, on_answer: Callable[[Engine, bool], bool]) -> None:
        self._engines = engines
        self._on_answer = on_answer
        self._asked: set[Engine] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, engines: Iterable[Engine]) -> None:
        """One question to each, unless one stands already."""
        for engine in engines:
            if engine not in self._asked:
                self._asked.add(engine)
                task = asyncio.create_task(self._ask(engine))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _ask(self, engine: Engine) -> None:
        granted = await self._engines.ask_for_place(engine.address)
        self._asked.discard(engine)  # the answer may lead to the next question
        if not self._on_answer(engine, granted) and granted:
            await self._engines.give_place_back(engine.address)
