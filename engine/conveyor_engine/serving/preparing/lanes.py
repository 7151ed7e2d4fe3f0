"""Decides which of the waiting jobs a free worker gets, so that costly bodies delay only their own kind. Pure.

A body is costly if its client or the model's author can make its preparation slow. Costly bodies leave one worker to
all other bodies. Long bodies, bodies with a form and bodies with files have a lane each, which has one worker. In a
lane, the first to come is the first to go.

Used by `pool`.
"""

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from conveyor_engine.serving.preparing.jobs import Lane, find_kind, has_plain_kinds
from conveyor_engine.wire.worker import Job, Reply

LONG_BYTES: Final = 256 * 2**10
_OF_ONE_WORKER: Final = (Lane.LONG, Lane.FORMS, Lane.FILES)  # a job that is in several of them waits in the first


def find_lanes(job: Job) -> frozenset[Lane]:
    """Return the lanes of a job. None: its preparation is cheap. A long body is not searched for a form or a file."""
    kind, is_long = find_kind(job), len(job.body) > LONG_BYTES
    lanes = {Lane.TEMPLATES} if kind.runs_template else set()
    if is_long:
        lanes.add(Lane.LONG)
    elif kind.lane is not None and has_plain_kinds(job.facts.task) and kind.is_costly(job.body):
        lanes.add(kind.lane)
    return frozenset(lanes)


@dataclass(slots=True, eq=False)
class Order:
    """A job that waits for a worker or is at one."""

    job: Job
    reply: asyncio.Future[Reply | None]  # None: the worker died
    lanes: frozenset[Lane] = field(init=False)
    number: int = 0  # in the order of arrival
    began: float = 0.0  # when a worker got it, in the event loop's time

    def __post_init__(self) -> None:
        self.lanes = find_lanes(self.job)

    @property
    def line(self) -> str:
        """The queue in which it waits: that of its narrowest lane, otherwise that of its kind."""
        return next((lane for lane in _OF_ONE_WORKER if lane in self.lanes), self.job.kind)


class Lines:
    """The queues of the jobs that wait for one of several workers."""

    def __init__(self, num_workers: int) -> None:
        """num_workers: at least 2, because costly bodies never get the last one."""
        self._num_costly_max = num_workers - 1
        self._numbers = itertools.count()
        self._lines: dict[str, deque[Order]] = {}

    def add(self, order: Order) -> None:
        """Let the order wait."""
        order.number = next(self._numbers)
        self._lines.setdefault(order.line, deque()).append(order)

    def discard(self, order: Order) -> None:
        """Let the order wait no longer."""
        with contextlib.suppress(KeyError, ValueError):
            self._lines[order.line].remove(order)

    def take_next(self, running: Collection[Order]) -> Order | None:
        """Return the earliest order that is first in its queue and may run beside these; None if there is none."""
        may_run = self._find_rule(running)
        lines = [line for line in self._lines.values() if line and may_run(line[0])]
        return min(lines, key=lambda line: line[0].number).popleft() if lines else None

    def _find_rule(self, running: Collection[Order]) -> Callable[[Order], bool]:
        taken = frozenset(_OF_ONE_WORKER).intersection(lane for order in running for lane in order.lanes)
        is_full = sum(bool(order.lanes) for order in running) >= self._num_costly_max
        return lambda order: not order.lanes or not (is_full or order.lanes & taken)
