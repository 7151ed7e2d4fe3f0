"""One request in the queue of its service, from its admission to its end.

Created by `service_queue`. `relaying` reads it, and returns it to the same queue.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from conveyor_gateway.admission.engine_order import Engine
from conveyor_gateway.admission.engine_pool import NUM_RESERVED_BITS, left_out_seconds
from conveyor_gateway.errors import GatewayError
from conveyor_gateway.watching.classes import UNCLASSED, QueueClass

# Bits of `Ticket.excluded` that do not stand for engines, but work like the bits of engines: a search with a bit skips
# the tickets in which it is set.
FIRST_TRY: Final = 1  # set once the request was sent to an engine, so a search finds requests that were never sent
UNREFUSED: Final = 2  # set once an engine rejected the request or failed with it, so a search finds the other requests
_NO_ENGINES: Final = (1 << NUM_RESERVED_BITS) - 1


class TicketState(Enum):
    QUEUED = auto()
    DISPATCHED = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class Work:
    """How many tokens a request has. The answer's are the most that it may have, or after its end those that it had."""

    prompt_tokens: float = 1.0
    answer_tokens: float = 0.0


ONE_TOKEN: Final = Work()


@dataclass(slots=True, eq=False)
class Ticket:
    """One admitted request. Times are on the loop's clock."""

    number: int  # lower for requests that were admitted earlier
    admitted_at: float
    deadline: float
    request_class: QueueClass = UNCLASSED
    level: int = 0  # of its class, or after a delay the least urgent level; lower goes first
    offset_seconds: float = 0.0  # the request is ordered as if it had arrived this much later
    client: str = ""  # shares the places of its level with other clients
    work: Work = ONE_TOKEN
    charged: float = 0.0  # of its client's counter, since it got a place
    prefix: int | None = None  # the beginning of its prompt, hashed; None: it has no home
    home: int = 0  # the bit of the engine that is the home of `prefix`; 0: none
    state: TicketState = TicketState.QUEUED
    engine: Engine | None = None
    is_granted: bool = False  # the engine has reserved the place
    waited_seconds: float = 0.0
    excluded: int = 0  # the bits of engines without room for this request, and the two bits above
    times_full: int = 0
    full_until: float = 0.0
    turn: asyncio.Future[None] | None = None  # set while the request waits
    met_old_engine: bool = False  # an engine did not serve its model yet
    refused_by: GatewayError | None = None  # the error that ends its wait

    @property
    def bound_engine(self) -> Engine:
        assert self.engine is not None, "only a dispatched request has an engine"
        return self.engine

    def bind(self, engine: Engine, is_granted: bool) -> None:
        """Give the request a place on `engine` and wake it. `is_granted`: the engine has reserved the place."""
        self.engine, self.state, self.is_granted = engine, TicketState.DISPATCHED, is_granted
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)

    def refuse(self, error: GatewayError) -> None:
        """End the wait with `error`."""
        self.refused_by = error
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(error)

    def exclude_engine(self, now_seconds: float) -> None:
        """Exclude the engine that had no room for this request, for longer each time."""
        if now_seconds >= self.full_until:
            self.end_exclusions()
        self.excluded |= self.bound_engine.bit | FIRST_TRY | UNREFUSED
        self.times_full += 1
        self.full_until = now_seconds + left_out_seconds(self.times_full)

    def end_exclusions(self) -> None:
        """Allow the request to go to any engine again."""
        self.excluded &= _NO_ENGINES
