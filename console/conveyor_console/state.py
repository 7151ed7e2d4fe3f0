"""What the pages show: the lines of all services, built anew after each read of the gateways, and their history."""

import asyncio
import time
from collections.abc import Sequence

from conveyor_console.gateways import Gateways
from conveyor_console.history import History
from conveyor_console.overview import Line, build_line, sort_lines
from conveyor_console.services import Services


class State:
    """The lines of all services, the most urgent one first."""

    def __init__(self, services: Services, gateways: Gateways) -> None:
        self._services = services
        self._gateways = gateways
        self._changed = asyncio.Event()
        self.lines: Sequence[Line] = ()
        self.read_at = time.time()
        """Unix time of the last read."""
        self.history = History()

    @property
    def problem(self) -> str:
        """Why some figures are missing; "" if none are."""
        return self._gateways.problem

    def find_line(self, service: str) -> Line | None:
        return next((line for line in self.lines if line.service.key == service), None)

    async def read(self) -> None:
        """Read the gateways, build the lines, and wake up those who wait for a change."""
        await self._gateways.read()
        requests = self._gateways.requests
        self.lines = sort_lines(
            build_line(service, None if requests is None else requests.get(key), self._gateways.find_figures(key))
            for key, service in self._services.by_key.items()
        )
        self.read_at = time.time()
        self.history.add(self.lines, self.read_at)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for_change(self) -> None:
        """Return after the next `read`."""
        await self._changed.wait()
