"""Fills a batch until its rows or its cost reach the limit. Used by policies whose batches close, and by `scheduler`.
Pure.

A packed batch costs the sum of its requests. A padded batch costs its number of requests times the largest cost.
Costs are in the unit of the engine's task (`registry.About.cost_unit`).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.request_state import RequestState


class BatchLimits(NamedTuple):
    """The limits of one batch. A request that costs more than `cost` is a separate batch."""

    limits: Limits
    cost: float = math.inf
    padded: bool = False

    @property
    def num_rows(self) -> int:
        return self.limits.num_rows


class Filling:
    """The requests of a batch, in order, and the batch's cost."""

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._sum = self._largest = 0
        self.requests: list[RequestState] = []
        self.full: str | None = None  # why the batch is full: "full" (no free row) or "cost"; None if it is not full

    @property
    def cost(self) -> int:
        return len(self.requests) * self._largest if self._limits.padded else self._sum

    @property
    def padding_share(self) -> float:
        """The part of the cost that is padding, from 0 to 1."""
        return 1 - self._sum / self.cost if self.cost else 0.0

    @property
    def num_free_rows(self) -> int:
        return self._limits.num_rows - len(self.requests)

    def extend(self, requests: Iterable[RequestState]) -> None:
        """Add requests in their order until the batch is full. No request overtakes one that does not fit."""
        for request in requests:
            if self.full or not self._add(request):
                return

    def _add(self, request: RequestState) -> bool:
        total, largest = self._sum + request.step_cost, max(self._largest, request.step_cost)
        cost = (len(self.requests) + 1) * largest if self._limits.padded else total
        if self.requests and cost > self._limits.cost:
            self.full = "cost"
            return False
        self.requests.append(request)
        self._sum, self._largest = total, largest
        if not self.num_free_rows:
            self.full = "full"
        return True
